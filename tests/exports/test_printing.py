"""Training code specialised, inlined and tidied: small texts whose results are known."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import libcst as cst
import pytest

import training
from service.exports import EXPORTS
from service.exports.printing import LOOP, MODULES
from service.exports.rewriting.inline import inlined
from service.exports.rewriting.specialise import Specialiser
from service.exports.rewriting.tidy import tidied
from service.recipe import Applied
from tests.conftest import ROOT
from tests.exports.test_targets import Facts, made
from training import script


def specialised(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The text for a recipe of these fields, and the constants that it names."""
    made = Specialiser({"recipe": SimpleNamespace(**fields)}, {})
    return cst.parse_module(text).visit(made).code, made.constants


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = recipe.size + 1", "x = SIZE + 1"),
        ("x = recipe.on", "x = True"),
        ("x = a if recipe.on else b", "x = a"),
        ("x = not recipe.on", "x = False"),
        ("x = recipe.size == 3", "x = True"),
        ("x = recipe.on and a", "x = a"),
        ("x = recipe.off or a", "x = a"),
        ("x = a and recipe.on", "x = a"),
        ("x = row[column] or ''", "x = row[column] or ''"),
        ("x = [a, *recipe.names] or None", "x = [a, *NAMES] or None"),
        ("x = a and True", "x = a and True"),
        ("x = recipe.names['a']", "x = 'b'"),
        ("x = f(a, recipe)", "x = f(a)"),
        ("x = f(a, b=recipe.nothing)", "x = f(a)"),
        ("x = f(**recipe.names)", "x = f(a='b')"),
        ("x = getattr(torch, recipe.kind)", "x = torch.float32"),
        ("x = task_of(recipe).encode(rows)", "x = encode(rows)"),
        ("x = apply(recipe.choice, model)", "x = change(model, every=2)"),
        ("for one in recipe.choices:\n    apply(one, model)", "change(model, every=2)"),
        ("for one in ('a', 'b'):\n    f(one)", "for one in ('a', 'b'):\n    f(one)"),
        ("if recipe.off:\n    f()\nelif a:\n    g()\nelse:\n    h()", "if a:\n    g()\nelse:\n    h()"),
        ("def f(a, *_, recipe):\n    return a", "def f(a, *_):\n    return a"),
        ("def f(*, recipe):\n    return recipe.on\n    g()", "def f():\n    return True"),
    ],
)
def test_what_the_recipe_decides_is_decided(text: str, expected: str) -> None:
    choice = Applied("checkpointing", "change", {"every": 2})
    fields = {"size": 3, "on": True, "off": False, "nothing": None, "kind": "float32", "names": {"a": "b"}}
    found, constants = specialised(text, **fields, choice=choice, choices=(choice,))
    assert ast.unparse(ast.parse(found)) == ast.unparse(ast.parse(expected))
    assert constants.get("SIZE", 3) == 3


@pytest.mark.parametrize(
    ("functions", "main", "expected"),
    [
        (["def f(a):\n    return a + 1"], "x = f(y)", "x = (y + 1)"),
        (["def f(a):\n    b = a\n    return b"], "x = f(y)", "b = y\n    x = b"),
        (["def f(a):\n    g(a)"], "f(y)", "g(y)"),
        (["def f(x):\n    x = g(x)\n    return x"], "x = f(x)", "x = g(x)"),
    ],
)
def test_small_functions_are_written_where_they_are_called(functions: list[str], main: str, expected: str) -> None:
    (found,) = inlined([*functions, f"def main():\n    {main}"])
    assert found.strip() == f"def main():\n    {expected}"


@pytest.mark.parametrize(
    ("function", "main"),
    [
        ("def f(a):\n    b = a\n    return b", "b = 1\n    x = f(y)\n    print(b)"),  # b would mean two things
        ("def f(a):\n    return a * a", "x = f(next(y))"),  # next(y) would be computed twice
        ("def f(a):\n    yield a", "x = f(y)"),
        ("def f(a):\n    del a", "f(y)"),
        ("def f(a):\n    if a:\n        return 1\n    return 2", "x = f(y)"),
        ("def f(a):\n    b = a\n    return g(b)", "x = f(y)\n    z = f(y)"),  # in two places
        ("def f(**rest):\n    return {'a': 1, **rest}", "x = f(b=2)"),
        ("def f(a):\n    return [b for b in a]", "b = f(b)"),
    ],
)
def test_a_function_stays_where_anything_could_come_of_it(function: str, main: str) -> None:
    statements = [function, f"def main():\n    {main}"]
    assert inlined(statements) == statements


def test_what_has_no_use_is_taken_out() -> None:
    before = [
        "def f(a, unused):\n    scaler = None\n    with contextlib.nullcontext():\n        g(a)",
        "def kept(a, unused):\n    return a",
        "def main():\n    f(1, unused=2)\n    h(kept)",
    ]
    assert tidied(before) == [
        "def f(a):\n    g(a)",
        "def kept(a, unused):\n    return a",
        "def main():\n    f(1)\n    h(kept)",
    ]


def test_keywords_that_a_function_only_swallows_are_taken_out() -> None:
    before = [
        "SIZE = 2",
        "SPAN = 8",
        "def f(a, *, b, **_):\n    return g(a, b)",
        "def h(a, **rest):\n    return g(a, **rest)",
        "def kept(a, **_):\n    return a",
        "def main():\n    f(1, b=SIZE, span=SPAN)\n    h(1, span=2)\n    k(kept)\n    kept(1, span=2)",
    ]
    assert tidied(before) == [
        "SIZE = 2",
        "def f(a, *, b):\n    return g(a, b)",
        "def h(a, **rest):\n    return g(a, **rest)",
        "def kept(a, **_):\n    return a",
        "def main():\n    f(1, b=SIZE)\n    h(1, span=2)\n    k(kept)\n    kept(1, span=2)",
    ]


def names_of(path: Path) -> set[str]:
    """The functions, classes and constants of a file."""
    found = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return found


def test_nothing_that_can_be_printed_together_has_the_same_name() -> None:
    """A script is one file: of two functions of a name one is lost, and what calls it may call itself for ever."""
    folder = Path(training.__file__).parent
    files = [folder / f"{name}.py" for name in (*MODULES, *LOOP) if "." not in name and name not in ("tasks", "levers")]
    files += [file for file in sorted((folder / "levers").glob("*.py")) if file.stem != "__init__"]
    given: dict[str, str] = {}
    for file in files:
        for name in names_of(file):
            assert given.setdefault(name, file.name) == file.name, f"{name} is in {given[name]} and in {file.name}"
    assert len(given) > 100


def test_a_process_that_prints_nothing_does_not_wait_for_libcst() -> None:
    """Each worker on a database and each control plane imports the exports' words, for its recommendations."""
    script = "import sys, service.api, worker.runner.loop; print(*{'libcst', 'service.exports'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "service.exports\n"


def test_batches_are_pinned_for_a_gpu_as_they_were_when_it_was_measured(facts: Facts) -> None:
    gpu = partial(facts, device="cuda", name="NVIDIA H100", has_own_memory=True, capability=(9, 0))
    for levers, pins in (({}, True), ({"loading": "unpinned"}, False)):
        text = EXPORTS["train.py"].write(made(gpu, **levers))
        assert (".pin_memory()" in text) is pins, levers
    assert ".pin_memory()" not in EXPORTS["train.py"].write(made(facts))


@pytest.mark.parametrize("target", ["train.py", "trainer", "trl"])
def test_an_evaluation_records_no_cuda_graphs(facts: Facts, target: str) -> None:
    """It would for each shape of its batches, of which there are many."""
    gpu = partial(facts, device="cuda", name="NVIDIA H100", has_own_memory=True, capability=(9, 0))
    for choice, eager in (("whole-reduce-overhead", True), ("whole", False)):
        text = EXPORTS[target].write(made(gpu, compile=choice, batching="padded", padding="max"))
        assert ('set_stance("force_eager")' in text) is eager, choice


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), (None, 8)]
)
def test_a_run_takes_no_more_threads_than_its_container_may_keep_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, cores: int
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    monkeypatch.setattr(script, "Path", lambda _: file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert script.usable_cores() == cores

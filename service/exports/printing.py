"""Prints training code as one script: the modules of training/, specialised for one recipe, inlined and tidied.

libcst is imported where a script is printed: it takes as long as all of FastAPI, and every worker and control plane
would wait for it at its start.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from service.contract.job import JobSpec
from service.contract.recommendation import Recommendation
from service.errors import NotYet
from service.exports.job_settings import on_cpu
from service.recipe import Applied, recipe_fields

# The modules of training/ in the order in which a script is read; `tasks` and `levers` are those of the recipe.
MODULES = (
    *("errors", "samples", "reading", "tasks", "levers.batching", "batches", "levers", "packing", "model"),
    *("levers.optimizer", "optimization", "source"),
)
LOOP = ("step", "evaluation", "script")  # our own loop; other trainers have theirs
WIDTH = 120
FUTURE = "from __future__ import annotations"


GUARD = """
if __name__ == "__main__":
    try:
        main()
    except (TrainingError, OSError, ValueError) as problem:
        sys.exit(f"<FILE>: {problem}")
"""


@dataclass(frozen=True)
class Definition:
    """A top-level function, class or constant: the names that it binds, its text, and the names that it uses."""

    names: tuple[str, ...]
    text: str
    uses: frozenset[str]
    is_value: bool


@dataclass(frozen=True)
class Decided:
    """Values of the recipe's fields. Two are equal when their texts are: a value need not be hashable."""

    text: str
    fields: Mapping[str, Any] = field(compare=False)


@dataclass(frozen=True)
class Module:
    """A module's text specialised for a recipe: its imports, what it defines, and the fields that it still mentions."""

    imports: tuple[str, ...]
    definitions: tuple[Definition, ...]
    constants: Mapping[str, Any]


def fields_of(recommendation: Recommendation, levers: Mapping[str, str], micro_batch_size: int) -> dict[str, Any]:
    """The recipe's fields of a recommendation, with these levers; NotYet where its data's columns are not known."""
    spec, chosen = JobSpec.model_validate(recommendation.spec), recommendation.configuration
    if recommendation.dataset is None or not recommendation.dataset.columns:
        raise NotYet("What was measured does not say which columns the data has; run the job again for its train.py.")
    fields = recipe_fields(
        spec,
        chosen.method,
        levers,
        chosen.learning_rate,
        chosen.effective_batch_size,
        micro_batch_size,
        chosen.evaluation_batch_size,
        recommendation.dataset,
        pin_memory=not on_cpu(recommendation),
    )
    if recommendation.evidence.measurement.remote_code:
        fields["source_options"] |= {"trust_remote_code": True}
    fields["pickled_weights"] = recommendation.evidence.measurement.pickled_weights
    return fields


def script(
    fields: dict[str, Any],
    head: str,
    file: str = "train.py",
    modules: Sequence[str] = (*MODULES, *LOOP),
    values: Mapping[str, str] | None = None,
) -> str:
    """The script for a recipe's fields, under `head` as its docstring.

    Where several modules define a name, the last module's counts. `values` (name -> text) replace the values that the
    modules give to these names.
    """
    from service.exports.rewriting.inline import inlined
    from service.exports.rewriting.tidy import tidied

    imports = ["import sys"]  # for the guard at the end
    mentioned: dict[str, Any] = {}
    definitions: dict[str, Definition] = {}
    for name in (source for module in modules for source in _files(module, fields)):
        made = _module(_source(name), fields)
        imports += made.imports
        mentioned |= made.constants
        for one in made.definitions:
            if values and one.names and one.names[0] in values:
                one = replace(one, text=f"{one.names[0]} = {values[one.names[0]]}")
            definitions |= dict.fromkeys(one.names, one)
    used = _reached({name: one.uses for name, one in definitions.items()}, {"main", "TrainingError"})
    constants = [f"{name} = {value!r}" for name, value in sorted(mentioned.items()) if name in used]
    wanted = [one for name, one in definitions.items() if name in used]
    made_of_code = {name for name, one in definitions.items() if one.text.startswith(("def ", "class ", "@"))}
    first = [one.text for one in wanted if one.is_value and not one.uses & made_of_code]
    body = [*constants, *first, *(one.text for one in wanted if one.text not in first)]
    before: list[str] = []
    while body != before:
        body, before = tidied(inlined(body)), body
    return formatted("\n".join([quoted(head), FUTURE, *dict.fromkeys(imports), *body, GUARD.replace("<FILE>", file)]))


def _module(source: str, fields: Mapping[str, Any]) -> Module:
    """The module's text specialised for a recipe; made once for all recipes whose fields that it names are the same."""
    named = set(re.findall(r"\w+", source))
    mine = {name: value for name, value in fields.items() if name in named}
    return _specialised(source, Decided(repr(mine), mine))


@lru_cache(maxsize=1024)
def _specialised(source: str, decided: Decided) -> Module:
    from service.exports.rewriting.inline import parsed
    from service.exports.rewriting.specialise import Specialiser

    specialiser = Specialiser({"recipe": SimpleNamespace(**decided.fields)}, {})
    tree = parsed(source).visit(specialiser)
    imports: list[str] = []
    definitions: list[Definition] = []
    for statement in tree.body[1:]:  # the first is the docstring
        text = tree.code_for_node(statement).strip()
        node = ast.parse(text).body[0]
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += [] if _is_ours(node) else [text]
        uses = frozenset(one.id for one in ast.walk(node) if isinstance(one, ast.Name))
        is_value = isinstance(node, ast.Assign | ast.AnnAssign)
        definitions.append(Definition(tuple(_bound(node)), text, uses, is_value))
    return Module(tuple(imports), tuple(definitions), specialiser.constants)


def _files(module: str, fields: dict[str, Any]) -> list[str]:
    """The files behind an entry of MODULES: `tasks` is the recipe's task, `levers` those of its chosen functions."""
    if module == "tasks":
        return [f"tasks/{fields['task'].replace('-', '_')}"]
    if module != "levers":
        return [module.replace(".", "/")]
    choices = [one for field in fields.values() for one in (field if isinstance(field, tuple) else (field,))]
    names = [one.lever for one in choices if isinstance(one, Applied) and f"levers.{one.lever}" not in MODULES]
    return [f"levers/{name}" for name in dict.fromkeys(names)]


def _source(name: str) -> str:
    """The text of a module of training/, wherever the path of its package leads. The module is not imported."""
    module = find_spec(f"training.{name.replace('/', '.')}")
    assert module is not None and module.origin is not None, "dynotune is installed with its training code"
    text = Path(module.origin).read_text("utf-8")
    return re.sub(r" *# type: ignore\[[\w, -]+\] *", "  ", text)


def _bound(node: ast.stmt) -> list[str]:
    """The names that a top-level statement binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _is_ours(node: ast.Import | ast.ImportFrom) -> bool:
    """Whether an import is of the training package, or of the future."""
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("training", "__future__")


def _reached(uses: dict[str, frozenset[str]], start: set[str]) -> set[str]:
    """All names that are needed, directly or by what is needed."""
    reached, waiting = set(start), list(start)
    while waiting:
        new = uses.get(waiting.pop(), frozenset()) - reached
        reached |= new
        waiting += new
    return reached


def formatted(text: str) -> str:
    """The text as ruff formats it, imports sorted and those that nothing uses left out."""
    from ruff.__main__ import find_ruff_bin

    ruff = find_ruff_bin()  # `python -m ruff` finds it as well, and takes six times as long
    same = ["--isolated", "--quiet", f"--line-length={WIDTH}", "-"]
    tidy = [ruff, "check", "--fix", "--exit-zero", "--select=F401,I001,F811", *same]
    for command in (tidy, [ruff, "format", *same]):
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def quoted(text: str) -> str:
    """The text as a docstring."""
    return '"""' + text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') + '"""'


def assigned(parts: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A dictionary's text, its keys in parts that each have a comment above them."""
    lines = [
        line for title, keys in parts for line in (f"    # {title}", *(f"    {k!r}: {v!r}," for k, v in keys.items()))
    ]
    return "\n".join(["{", *lines, "}"])

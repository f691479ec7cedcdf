"""train.py: one file, plain torch, transformers and peft, that trains exactly as the trial did.

It is the code of the package `training`, which a trial imports, specialised for one recipe (specialise.py). The package
is read as text: the control plane imports none of it that needs torch.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from service.contract.job import JobSpec
from service.contract.recommendation import Recommendation
from service.errors import NotYet
from service.exports.base import Export
from service.exports.inline import inlined, parsed
from service.exports.specialise import Specialiser
from service.exports.tidy import tidied
from service.recipe import Applied, recipe_fields

# The modules of training/ in the order in which a script is read; `tasks` and `levers` are those of the recipe.
MODULES = (
    *("errors", "samples", "reading", "tasks", "levers.batching", "batches", "levers", "model", "levers.optimizer"),
    *("optimization", "step", "evaluation", "script"),
)
WIDTH = 120
FUTURE = "from __future__ import annotations"


def write(recommendation: Recommendation) -> str:
    """The script, with the recommendation's configuration written into it."""
    spec, chosen = JobSpec.model_validate(recommendation.spec), recommendation.configuration
    if recommendation.dataset is None or not recommendation.dataset.columns:
        raise NotYet("What was measured does not say which columns the data has; run the job again for its train.py.")
    fields = recipe_fields(
        spec,
        chosen.method,
        chosen.levers,
        chosen.learning_rate,
        chosen.effective_batch_size,
        chosen.micro_batch_size,
        chosen.evaluation_batch_size,
        recommendation.dataset,
    )
    if recommendation.evidence.measurement.remote_code:
        fields["source_options"] |= {"trust_remote_code": True}
    return script(fields, _head(recommendation))


GUARD = """
if __name__ == "__main__":
    try:
        main()
    except (TrainingError, OSError) as problem:
        sys.exit(f"train.py: {problem}")
"""


@dataclass(frozen=True)
class Definition:
    """A top-level function, class or constant: its text, and the names that it uses."""

    text: str
    uses: frozenset[str]
    is_value: bool


def script(fields: dict[str, Any], head: str) -> str:
    """The script for a recipe's fields, under `head` as its docstring."""
    specialiser = Specialiser({"recipe": SimpleNamespace(**fields)}, {})
    imports: list[str] = []
    definitions: dict[str, Definition] = {}
    for name in (file for module in MODULES for file in _files(module, fields)):
        tree = parsed(_source(name)).visit(specialiser)
        for statement in tree.body[1:]:  # the first is the docstring
            text = tree.code_for_node(statement).strip()
            node = ast.parse(text).body[0]
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += [] if _is_ours(node) else [text]
            uses = frozenset(one.id for one in ast.walk(node) if isinstance(one, ast.Name))
            is_value = isinstance(node, ast.Assign | ast.AnnAssign)
            definitions |= dict.fromkeys(_bound(node), Definition(text, uses, is_value))
    used = _reached({name: one.uses for name, one in definitions.items()}, {"main", "TrainingError"})
    constants = [f"{name} = {value!r}" for name, value in sorted(specialiser.constants.items()) if name in used]
    wanted = [one for name, one in definitions.items() if name in used]
    made_of_code = {name for name, one in definitions.items() if one.text.startswith(("def ", "class ", "@"))}
    first = [one.text for one in wanted if one.is_value and not one.uses & made_of_code]
    body = [*constants, *first, *(one.text for one in wanted if one.text not in first)]
    quoted = '"""' + head.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') + '"""'
    before: list[str] = []
    while body != before:
        body, before = tidied(inlined(body)), body
    return _formatted("\n".join([quoted, FUTURE, *dict.fromkeys(imports), *body, GUARD]))


def _files(module: str, fields: dict[str, Any]) -> list[str]:
    """The files behind an entry of PARTS: `tasks` is the recipe's task, `levers` are those of its chosen functions."""
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


def _formatted(text: str) -> str:
    """The text as ruff formats it, imports sorted and those that nothing uses left out."""
    ruff = [sys.executable, "-m", "ruff"]
    same = ["--isolated", "--quiet", f"--line-length={WIDTH}", "-"]
    tidy = [*ruff, "check", "--fix", "--exit-zero", "--select=F401,I001,F811", *same]
    for command in (tidy, [*ruff, "format", *same]):
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _head(recommendation: Recommendation) -> str:
    """What was seen, how to run the script, and what it needs."""
    evidence, environment = recommendation.evidence, recommendation.environment
    versions = " ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    faster = f", {evidence.speedup:.2f}x the baseline" if evidence.speedup else ""
    unsure = "" if recommendation.stability.stable else ", not verified"
    return f"""Finetune with the fastest stable configuration that dynotune measured. This file is yours: change it.

    python train.py [--model M] [--data D] [--epochs E] [--max-steps N] [--output DIR] [--resume] [--log FILE]

Measured: {evidence.tokens_per_second:,.0f} non-padding tokens/s{faster}{unsure},
on {environment.get("name", "an unnamed device")} ({versions}).
On a CPU, set OMP_WAIT_POLICY=PASSIVE before starting it, as dynotune did: it matters where others compute too.
"""


EXPORT = Export("train.py", "a script that trains exactly as was measured, with torch, transformers and peft", write)

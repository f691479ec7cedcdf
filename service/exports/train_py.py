"""train.py: one file, plain torch + transformers + peft, that trains exactly as the trial did.

Its parts lie in templates/, a folder that is no package, since the control plane imports no torch: they are
linted and type-checked there, read as text here, joined, and given their CONFIG.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from service.contract.job import JobSpec
from service.contract.recommendation import Recommendation
from service.levers.batching import GROUP_STEPS

PARTS = ("common", "data", "batching", "model", "train")
PLACEHOLDER = "CONFIG: dict[str, Any] = {}\n"
_TEXTS = {name: (Path(__file__).parent / "templates" / f"{name}.py").read_text("utf-8") for name in PARTS}


def train_py(recommendation: Recommendation) -> str:
    """The script, with the recommendation's configuration written into it."""
    text = _joined()
    assert text.count(PLACEHOLDER) == 1, "the template has one place for CONFIG"
    return text.replace(PLACEHOLDER, f"CONFIG: dict[str, Any] = {_literal(_config(recommendation))}\n")


def _config(recommendation: Recommendation) -> dict[str, Any]:
    """What the script needs to know, and nothing else."""
    spec = JobSpec.model_validate(recommendation.spec)
    configuration = recommendation.configuration
    return {
        "measured": _measured(recommendation),
        "task": spec.task,
        "model": spec.model.model_dump(),
        "dataset": spec.dataset.model_dump(),
        "method": configuration.method,
        "lora": recommendation.LoraConfig,
        "levers": configuration.levers,
        "micro_batch_size": configuration.micro_batch_size,
        "effective_batch_size": configuration.effective_batch_size,
        "evaluation_batch_size": configuration.evaluation_batch_size,
        "learning_rate": configuration.learning_rate,
        "group_steps": GROUP_STEPS[spec.search.verify],
        "training": spec.training.model_dump(exclude={"learning_rate", "effective_batch_size"}),
    }


def _measured(recommendation: Recommendation) -> str:
    """What was seen, in a line."""
    evidence, environment = recommendation.evidence, recommendation.environment
    versions = " ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    faster = f", {evidence.speedup:.2f}x the baseline" if evidence.speedup else ""
    unsure = "" if recommendation.stability.stable else ", not verified"
    return (
        f"dynotune measured {evidence.tokens_per_second:,.0f} non-padding tokens/s{faster}{unsure}, "
        f"on {environment.get('name', 'an unnamed device')} ({versions})"
    )


def _literal(value: Any, indent: int = 0) -> str:
    """JSON-like data as a Python literal, one entry of a dictionary a line."""
    if isinstance(value, dict) and value:
        inner = " " * (indent + 4)
        lines = [f"{inner}{_literal(name)}: {_literal(one, indent + 4)},\n" for name, one in value.items()]
        return "{\n" + "".join(lines) + " " * indent + "}"
    if isinstance(value, str):
        # JSON's escapes are Python's, for one character at a time.
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(one, indent) for one in value) + "]"
    return repr(value)


def _joined() -> str:
    """The last part's docstring, the imports of all parts sorted, then the parts one after the other."""
    imports: dict[str, set[str]] = {}
    bodies = []
    doc = ""
    for name in PARTS:
        tree = ast.parse(_TEXTS[name])
        nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in nodes:
            if isinstance(node, ast.Import):
                imports |= {alias.name: set() for alias in node.names}
            elif node.module and not node.module.startswith(("service.", "__future__")):
                imports.setdefault(f"from {node.module}", set()).update(alias.name for alias in node.names)
        lines = _TEXTS[name].splitlines()
        end = nodes[-1].end_lineno
        bodies.append("\n".join(lines[end:]).strip("\n"))
        doc = "\n".join(lines[: tree.body[0].end_lineno])
    blocks = [_imports({name: names for name, names in imports.items() if _own(name) is own}) for own in (True, False)]
    return "\n\n".join([doc, "from __future__ import annotations", *blocks, "\n\n\n".join(bodies)]) + "\n"


def _own(name: str) -> bool:
    """Whether Python brings the module."""
    return name.removeprefix("from ").split(".")[0] in sys.stdlib_module_names


def _imports(imports: dict[str, set[str]]) -> str:
    """Import lines in isort's order."""
    plain = sorted(f"import {name}" for name in imports if not name.startswith("from "))
    named = sorted(name for name in imports if name.startswith("from "))
    # Constants, then classes, then the rest: isort's order within a line.
    return "\n".join(
        plain
        + [
            f"{name} import {', '.join(sorted(imports[name], key=lambda one: (one[0].islower(), one)))}"
            for name in named
        ]
    )

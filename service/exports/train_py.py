"""train.py: one file, plain torch + transformers + peft, that trains exactly as the trial did.

Its parts lie in templates/, a folder that is no package, since the control plane imports no torch: they are
linted and type-checked there, read as text here, joined, and given their CONFIG.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from service.contract.job import JobSpec
from service.contract.recommendation import Recommendation
from service.exports.joining import joined, only
from service.levers import LEVERS
from service.levers.base import Choice, Lever
from service.levers.batching import GROUP_STEPS, PACKED

PARTS = ("common", "masking", "segments", "data", "batching", "levers", "model", "train")
PLACEHOLDER = "CONFIG: dict[str, Any] = {}\n"
FOLDER = Path(__file__).parent / "templates"
MARK = re.compile(r"^    .*  # LEVERS: (.*)\n", re.MULTILINE)
LONGEST = 119
FIRST = {
    "load": "{}({})",
    "optimizer": "return {}(groups, rate{})",
    "batching": "return {}(order, lengths, **sizes{})",
    "loading": "return {}(steps, make, pin{})",
    "evaluation": "return {}(model{})",
    "quantised": "return {}(whole, compute{})",
}


def train_py(recommendation: Recommendation) -> str:
    """The script, with the recommendation's configuration written into it."""
    config = _config(recommendation)
    chosen = [(lever, lever.choice(config["levers"][name])) for name, lever in LEVERS.items()]
    texts = [_levers(chosen) if name == "levers" else _calls(_read(name), chosen) for name in PARTS]
    text = joined(texts)
    assert text.count(PLACEHOLDER) == 1, "the template has one place for CONFIG"
    return text.replace(PLACEHOLDER, f"CONFIG: dict[str, Any] = {_literal(config)}\n")


def _read(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text("utf-8")


def _levers(chosen: list[tuple[Lever, Choice]]) -> str:
    """The functions of the chosen levers, with what they need of their files."""
    wanted = {lever.name: choice.function for lever, choice in chosen if choice.function}
    return joined([only(_read(f"levers/{name}"), {function}) for name, function in wanted.items()], comment="levers")


def _calls(text: str, chosen: list[tuple[Lever, Choice]]) -> str:
    """A template with the marked lines replaced by calls of the chosen levers' functions."""

    def calls(mark: re.Match[str]) -> str:
        stages = mark[1].split(", ")
        first = FIRST.get(mark[1], "{}(model{})")
        lines = []
        for stage in stages:
            for lever, choice in chosen:
                if lever.stage == stage and choice.function:
                    arguments = "".join(f", {name}={value!r}" for name, value in choice.options.items())
                    arguments = arguments.removeprefix(", ") if stage == "load" else arguments
                    line = "    " + first.format(choice.function, arguments)
                    if len(line) > LONGEST:
                        line = line.removesuffix(")").replace(", ", ",\n        ").replace("(", "(\n        ", 1)
                        line += ",\n    )"
                    lines.append(line + "\n")
        return "".join(lines)

    return MARK.sub(calls, text)


def _config(recommendation: Recommendation) -> dict[str, Any]:
    """What the script needs to know, and nothing else."""
    spec = JobSpec.model_validate(recommendation.spec)
    configuration = recommendation.configuration
    options = {name: dict(LEVERS[name].choice(choice).options) for name, choice in configuration.levers.items()}
    return {
        "measured": _measured(recommendation),
        "task": spec.task,
        "model": spec.model.model_dump(),
        "dataset": spec.dataset.model_dump(),
        "method": configuration.method,
        "lora": recommendation.LoraConfig,
        "levers": configuration.levers,
        "attention": recommendation.from_pretrained["attn_implementation"],
        "autocast_adapter_dtype": options["adapter"].get("autocast_adapter_dtype", True),
        "packed": configuration.levers["batching"] in PACKED,
        "padding": options["padding"],
        "precision": options["precision"],
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

"""The head of an exported file, and its settings lever by lever."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from service.contract.recommendation import Recommendation
from service.exports.job_settings import on_gpu
from service.exports.words import Target, sentences

WIDTH = 116
SHOWN = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")

KEPT_TO_ONE = "It was measured on one GPU. On N GPUs it would train with N times the effective batch."


def head(target: Target, recommendation: Recommendation, differs: Sequence[str] = ()) -> str:
    """What was measured and with what, what the target pins, and what it does not say, in lines."""
    evidence, environment = recommendation.evidence, recommendation.environment
    versions = environment.get("versions", {})
    measured = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    faster = f", {evidence.speedup:.2f}x the baseline" if evidence.speedup else ""
    unsure = "" if recommendation.stability.stable else ", not verified"
    text = [
        f"Finetune with {target.title} as dynotune measured it best. This file is yours: change it.",
        "",
        f"    {target.command(recommendation)}",
        "",
        *([KEPT_TO_ONE, ""] if on_gpu(recommendation) else ()),
        f"Measured with train.py: {evidence.tokens_per_second:,.0f} non-padding tokens/s{faster}{unsure}, "
        f"on {environment.get('name', 'an unnamed device')}" + (f" ({measured})." if measured else "."),
        f"Written for {target.package} {target.version}, which pins {', '.join(target.pins)}. Speed and stability "
        f"were not measured with {target.title}.",
    ]
    lost = [f"- {one}." for one in sentences(target.losses(recommendation))]
    if lost:
        text += ["", "Not said here as it was measured:", *lost]
        if (slower := target.slower(recommendation)) > 1:
            text += [
                f"Without all that cannot be said a run takes about {slower:.2f} times as long: the product of what "
                "each brings by itself, an estimate."
            ]
    else:
        text += ["", "It says every lever as it was measured."]
    if others := (*target.differs, *differs):
        text += ["", f"Another way with {target.title} in any case:", *(f"- {one}." for one in others)]
    return "\n".join(line for part in text for line in _wrapped(part))


def _wrapped(part: str) -> list[str]:
    """A paragraph or a point in lines; a command stays in one."""
    if part.startswith("    "):
        return [part]
    return textwrap.wrap(part, WIDTH, subsequent_indent="  " if part.startswith("- ") else "") or [""]


def commented(text: str) -> str:
    """The text as comments of YAML or Python."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def by_lever(target: Target, recommendation: Recommendation) -> list[tuple[str, dict[str, Any]]]:
    """(what stands over them, keys with values) for each lever that has keys, and for all other levers together."""
    values, levers = target.keys(recommendation), recommendation.configuration.levers
    left, parts = dict(values), []
    for name, word in target.spoken(recommendation).items():
        mine = {key: left.pop(key) for key in word.keys if key in left}
        if mine:
            nearly = (
                "" if word.verdict == "says" else f" ({'the nearest' if word.verdict == 'nearest' else 'not said'})"
            )
            parts.append((f"{name}: {levers[name]}{nearly}", mine))
    return [*parts, ("what levers could change besides, as it changes nothing", left)] if left else parts


def yaml_file(
    target: Target, recommendation: Recommendation, job: Mapping[str, Any], differs: Sequence[str] = ()
) -> str:
    """A YAML file: the head, the job's own settings, and those of the levers, each under its name."""
    parts = [commented(head(target, recommendation, differs)), _dumped(job)]
    parts += [f"# {title}\n{_dumped(keys)}" for title, keys in by_lever(target, recommendation)]
    return "\n".join(parts)


def _dumped(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=WIDTH)

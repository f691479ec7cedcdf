"""Writes docs/exports.md from the exports' words: `python docs/make_exports.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from service.exports import EXPORTS, Export
from service.exports.words import Target, Word
from service.levers import LEVERS

HEAD = """# Exports

Made from `service/exports` by `python docs/make_exports.py`. `dynotune export JOB` lists the exports of a job, with
what each loses there and what that costs; `dynotune export JOB -f NAME` writes one.

| export | for | file | start it with |
|---|---|---|---|
"""
TABLE = """
Two more train nothing: `json` is the recommendation with its evidence, `spec` the job that led to it, to run it again.

## Who says what

**says**: the trainer does the same. *nearest*: it does something near it, and the file says what. cannot: it has
nothing of the kind. Where two words stand, which of them holds depends on what else was chosen, such as the
method. `train.py` says everything.

"""
HELD = """
## How they are held to their trainers

A file names the versions that were measured and those that its trainer pins: speed and stability were measured with
`train.py`, not there. Every lever is written, as unset keys are not neutral: TRL and ms-swift checkpoint unasked,
LLaMA-Factory does so reentrantly, Axolotl computes in bf16 and TF32 where the device can and drops rows that are too
long. What was measured on a GPU is started with `CUDA_VISIBLE_DEVICES=0`: on all GPUs that they see, trainers would
train with that many times the effective batch.

`make test` holds every key to the fields that the trainers know. `python .ci/export_fields.py` reads these from their
wheels without running them, and keeps them in `tests/exports/fields` with versions and checksums. Names of optimizers
and attention kernels are held to the trainers' lists, `accelerate.yaml` to accelerate's own parser, and the script for
Trainer trains: its losses are those of the trial. `make test-exports` reads the files with TRL's, ms-swift's and
LLaMA-Factory's parsers and Axolotl's schema, trains with the script for TRL, has the script for Unsloth read data, and
compares the kept fields with the wheels.
"""


def rows() -> str:
    """The table of exports."""
    lines = []
    for name, export in EXPORTS.items():
        if export.fits:
            run = export.target.run if export.target else f"python {export.file}"
            lines.append(f"| `{name}` | {export.fits} | `{export.file}` | `{run}` |")
    return "\n".join(lines) + "\n"


def verdicts(word: Word) -> str:
    """The verdicts that a word may come to."""
    marks = {"says": "**says**", "nearest": "*nearest*", "cannot": "cannot"}
    return " / ".join(dict.fromkeys(marks[one.verdict] for one in word.every()))


def table(targets: dict[str, Target]) -> str:
    """A row a choice, a column an export."""
    lines = [f"| choice | {' | '.join(targets)} |", "|---" * (len(targets) + 1) + "|"]
    for lever in LEVERS.values():
        for choice in lever.names:
            cells = (verdicts(target.word(lever.name, choice)) for target in targets.values())
            lines.append(f"| {lever.name}={choice} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def notes(target: Target) -> Iterable[str]:
    """A line for each thing that is not said, with the choices that it is about."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, choice in ((lever.name, choice) for lever in LEVERS.values() for choice in lever.names):
        for word in target.word(name, choice).every():
            if word.verdict != "says":
                found.setdefault((word.verdict, word.note), []).append(f"{name}={choice}")
    for (verdict, note), choices in sorted(found.items(), reverse=True):
        yield f"- {'nearest' if verdict == 'nearest' else 'cannot'}, {', '.join(dict.fromkeys(choices))}: {note}."


def section(name: str, export: Export, target: Target) -> str:
    """What is to be known of one export."""
    pins = ", ".join(f"`{pin}`" for pin in target.pins)
    about = f"`{name}`: {export.summary}. Written for {target.package} {target.version}, which pins {pins}."
    differs = [f"- in any case: {one}." for one in target.differs]
    return "\n".join([f"## {target.title}", "", about, "", *notes(target), *differs]) + "\n"


def text() -> str:
    """The whole page."""
    targets = {name: export.target for name, export in EXPORTS.items() if export.target is not None}
    sections = [section(name, EXPORTS[name], target) for name, target in targets.items()]
    return "\n".join([HEAD + rows() + TABLE + table(targets) + HELD, *sections])


if __name__ == "__main__":
    (Path(__file__).parent / "exports.md").write_text(text(), encoding="utf-8")

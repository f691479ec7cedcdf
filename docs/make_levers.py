"""Writes docs/levers.md from the catalogue: `python docs/make_levers.py`."""

from __future__ import annotations

from pathlib import Path

from service.levers import LEVERS, METHOD_NEEDS, exclusions
from service.levers.base import Choice, Lever

HEAD = """# Levers

Made from `service/levers` by `python docs/make_levers.py`; `dynotune levers` shows the same, with what each
worker lacks.

**Numerics** says what a choice changes: *rounding*: results differ by rounding only; *order*: samples come in another
order; *learning*: what is learnt may differ, so it is searched with `search.quality: allow` only. The **baseline** is
what a Trainer user gets without thinking. Choices *by name* are never searched, only taken when a job fixes them.
"""


def needs(choice: Choice) -> str:
    """What the worker must have."""
    return "; ".join(need.sentence.removeprefix("needs ").split(":")[0].split(";")[0] for need in choice.needs) or "–"


def changes(choice: Choice) -> str:
    """What the choice changes."""
    kinds = {
        "rounding": choice.changes_numerics,
        "order": choice.changes_order,
        "learning": choice.changes_learning,
    }
    return ", ".join(name for name, holds in kinds.items() if holds) or "–"


def table(lever: Lever) -> str:
    """One lever's section."""
    limits = []
    if len(lever.methods) < len(METHOD_NEEDS):
        limits.append(f"Only with {' and '.join(lever.methods)}.")
    if lever.tasks is not None:
        limits.append(f"Only for {' and '.join(lever.tasks)}.")
    lines = [f"## {lever.name}", "", " ".join([lever.summary, *limits, f"[Source]({lever.source})"]), ""]
    lines += ["| choice | what | needs | numerics | for Trainer |", "|---|---|---|---|---|"]
    for choice in lever.choices:
        name = f"**{choice.name}** (baseline)" if choice.name == lever.baseline else choice.name
        name += "" if choice.searched else " (by name)"
        trainer = choice.not_expressible or ", ".join(
            f"`{key}={value!r}`"
            for key, value in (dict(choice.training_arguments) | dict(choice.from_pretrained)).items()
        )
        cells = (name, choice.summary, needs(choice), changes(choice), trainer or "–")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def excluded() -> str:
    """The table of combinations that are never tried."""
    lines = ["## Never tried together", "", "| combination | why |", "|---|---|"]
    for exclusion in exclusions():
        when = ", ".join(f"{name}: {' / '.join(values)}" for name, values in exclusion.when.items())
        lines.append(f"| {when} | {exclusion.reason} ([source]({exclusion.reference})) |")
    return "\n".join(lines) + "\n"


def together() -> str:
    """The table of what choices are expected to do to one another, which orders a search's first trials."""
    lines = [
        "## Expected of choices together",
        "",
        "| combination | factor on the seconds, beside what each does by itself | why |",
        "|---|---|---|",
    ]
    for pair in (one for lever in LEVERS.values() for one in lever.together):
        when = ", ".join(f"{name}: {' / '.join(choices)}" for name, choices in pair.when.items())
        lines.append(f"| {when} | {pair.factor:g} | {pair.reason} |")
    return "\n".join(lines) + "\n"


def text() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(table(lever) for lever in LEVERS.values()), together(), excluded()])


if __name__ == "__main__":
    (Path(__file__).parent / "levers.md").write_text(text(), encoding="utf-8")

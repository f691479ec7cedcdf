"""Part `memory`: the largest batch found against brute force, a soak at it, the estimate against the measurement."""

from __future__ import annotations

from functools import partial

from benchmarks.acceptance.models import data, model
from benchmarks.acceptance.place import Failed, Part, Place, Step, against
from benchmarks.finders import estimates
from benchmarks.finders.cases import Case
from benchmarks.finders.ours import Machine, dynotune, truth, warm
from benchmarks.finders.soaks import soak
from benchmarks.store import Row, say

MOST_PROBES = 5
# Seconds that have to be left to begin the finder, the brute force, the soak and the estimate; and the soak's steps.
TIMES = {"llama-1b": (40, 60, 30, 15), "llama-8b": (60, 90, 45, 20)}
SOAK_STEPS = {"llama-1b": 100, "llama-8b": 30}


def cases(place: Place) -> list[Case]:
    """On a GPU under a cap of 24 GiB and with all its memory; in a dry run one small case.

    Rows are short, so that 40 and more fit: of 25 rows, which fit of 256 tokens on an H200, one is 4%.
    """
    if place.dry:
        return [Case("llama-1b", "lora", "fp32", 1.0, 64, place.device, "pretrained")]
    return [
        Case("llama-1b", "lora", "bf16-mixed", 24, 128, place.device, "pretrained"),
        Case("llama-8b", "lora", "bf16-mixed", None, 256, place.device, "pretrained"),
    ]


def prepared(place: Place, case: Case) -> Machine:
    """The machine, with the case's model, rows and tokens there."""
    model(place, case.model)
    data(place, "functions")
    made = Machine(place.facts, place.home, 600.0, deadline=place.deadline)
    warm(made, case)
    return made


def found(place: Place, case: Case) -> Row:
    """What the finder says."""
    row = dynotune(prepared(place, case), case)
    if not row["found"]:
        raise Failed(row["note"])
    return row


def largest(place: Place, case: Case) -> int:
    """What the finder said; Failed before it has."""
    size = place.rows.get(f"memory/{case.name}", {}).get("found")
    if not size:
        raise Failed("its largest batch is not known yet")
    return int(size)


def real(place: Place, case: Case) -> Row:
    """The truth, by brute force around what was found."""
    return truth(prepared(place, case), case, largest(place, case), say)


def soaked(place: Place, case: Case) -> Row:
    """A soak at what was found, which has to hold; cut off, the next call goes on with it."""
    row = soak(prepared(place, case), case, largest(place, case), place.pick(SOAK_STEPS[case.model], 3))
    if row["outcome"] not in ("held", "out_of_memory"):
        raise Failed(f"{row['outcome']}: {row['note']}")
    return row


def estimated(place: Place, case: Case) -> Row:
    """The estimate, without running a step, beside the probe's peaks."""
    measured, true = (place.rows.get(f"memory/{case.name}{end}", {}) for end in ("", "/truth"))
    if "true" not in true:
        raise Failed("its true maximum is not known yet")
    return estimates.estimated(prepared(place, case), case, measured, true["true"])


def steps(place: Place) -> list[Step]:
    """Four a case; the truth takes a child a size, so it needs the most."""
    made = []
    for case in cases(place):
        name = f"memory/{case.name}"
        makers = {"": found, "/truth": real, "/soak": soaked, "/estimate": estimated}
        for (end, maker), seconds in zip(makers.items(), TIMES[case.model], strict=True):
            made.append(Step(name + end, seconds, partial(maker, case=case)))
    return made


def show(place: Place, rows: dict[str, Row]) -> list[str]:
    """Three lines a case."""
    lines = []
    for case in cases(place):
        ends = ("", "/truth", "/soak", "/estimate")
        row, true, held, guess = (rows.get(f"memory/{case.name}{end}", {}) for end in ends)
        if "found" in row and "true" in true:
            share = row["found"] / max(1, true["true"])
            probes = f"{row['probes']} probes{'' if row['probes'] <= MOST_PROBES else ' (TOO MANY)'}"
            lines.append(
                against(share, 0.97, f"{case.name}: {row['found']} of {true['true']} rows, {probes}, found/true")
            )
        if "outcome" in held:
            lines.append(f"{case.name}: soak of {held['steps']} steps: {held['outcome']} {held['note']}".rstrip())
        if "error" in guess:
            sizes = f"{guess['predicted']} rows for {guess['true']}"
            lines.append(f"{case.name}: estimate {guess['error']:+.1%} of the peak, {sizes}")
    return lines


PART = Part("memory", steps, show)

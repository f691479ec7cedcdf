"""Part `memory`: the largest batch found against brute force, a soak at it, the estimate against the measurement."""

from __future__ import annotations

import os
from functools import partial

from finders import estimates
from finders.cases import Case
from finders.ours import MALLOC, Machine, dynotune, truth, warm
from finders.soaks import soak

from acceptance.models import data, model
from acceptance.place import Failed, Part, Place, Row, Step, against, say
from worker.sandbox import Sandbox

SOAK_STEPS = 300
MOST_PROBES = 5


def cases(place: Place) -> list[Case]:
    """On a GPU under a cap of 24 GiB and with all its memory; in a dry run one small case."""
    if place.dry:
        return [Case("llama-1b", "lora", "fp32", 1.0, 64, place.device, "pretrained")]
    return [
        Case("llama-1b", "lora", "bf16-mixed", 24, 2048, place.device, "pretrained"),
        Case("llama-1b", "full", "bf16-mixed", 24, 512, place.device, "pretrained"),
        Case("llama-8b", "lora", "bf16-mixed", None, 2048, place.device, "pretrained"),
    ]


def machine(place: Place) -> Machine:
    """Where the finders' children run."""
    if place.device == "cpu":
        os.environ.update(MALLOC)
    Sandbox(place.device)  # sets what the fork server imports, which all children begin with
    return Machine(place.facts, place.home, max(60.0, place.left()))


def prepared(place: Place, case: Case) -> Machine:
    """The machine, with the case's model, rows and tokens there."""
    model(place, case.model)
    data(place, "functions")
    made = machine(place)
    warm(made, case)
    return made


def found(place: Place, case: Case) -> Row:
    """The finder and the truth around what it found."""
    made = prepared(place, case)
    row = dynotune(made, case)
    if not row["found"]:
        raise Failed(row["note"])
    real = truth(made, case, row["found"], say)
    return row | {"true": real["true"], "fitted": real["fitted"]}


def soaked(place: Place, case: Case) -> Row:
    """A soak at what was found, which has to hold."""
    largest = place.rows.get(f"memory/{case.name}", {}).get("found")
    if not largest:
        raise Failed("its largest batch is not known yet")
    return soak(prepared(place, case), case, largest, place.pick(SOAK_STEPS, 3))


def estimated(place: Place, case: Case) -> Row:
    """The estimate, without running a step, beside the probe's peaks."""
    measured = place.rows.get(f"memory/{case.name}", {})
    if not measured.get("found"):
        raise Failed("its largest batch is not known yet")
    return estimates.estimated(prepared(place, case), case, measured, measured["true"])


def steps(place: Place) -> list[Step]:
    """Three a case; the truth takes a child a size, so it needs the most."""
    made = []
    for case in cases(place):
        name = f"memory/{case.name}"
        made.append(Step(name, 240, partial(found, case=case)))
        made.append(Step(f"{name}/soak", 200, partial(soaked, case=case)))
        made.append(Step(f"{name}/estimate", 60, partial(estimated, case=case)))
    return made


def show(place: Place, rows: dict[str, Row]) -> list[str]:
    """Three lines a case."""
    lines = []
    for case in cases(place):
        row, held, guess = (rows.get(f"memory/{case.name}{end}", {}) for end in ("", "/soak", "/estimate"))
        if "found" in row:
            share = row["found"] / max(1, row["true"])
            probes = f"{row['probes']} probes{'' if row['probes'] <= MOST_PROBES else ' (TOO MANY)'}"
            lines.append(
                against(share, 0.97, f"{case.name}: {row['found']} of {row['true']} rows, {probes}, found/true")
            )
        if "outcome" in held:
            lines.append(f"{case.name}: soak of {held['steps']} steps: {held['outcome']} {held['note']}".rstrip())
        if "error" in guess:
            sizes = f"{guess['predicted']} rows for {guess['true']}"
            lines.append(f"{case.name}: estimate {guess['error']:+.1%} of the peak, {sizes}")
    return lines


PART = Part("memory", steps, show)

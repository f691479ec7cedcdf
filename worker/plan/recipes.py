"""Known-good recipes for a device, and single changes around the best: what a person would try first."""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement
from service.levers import LEVERS
from worker.plan.space import Space, make


def recipes(spec: JobSpec, facts: HardwareFacts, method: Method, choices: Space, effective: int) -> list[Configuration]:
    """The device's recipes within the space: each ranked choice of the levers that want one recipe a choice."""

    def first(lever: str, preferred: tuple[str, ...]) -> str:
        return next((choice for choice in preferred if choice in choices[lever]), choices[lever][0])

    # What is only emulated here is not ranked: it is tried later, if it was asked for.
    common = {
        name: first(name, lever.ranked(facts) if lever.recipe == "first" else (lever.baseline,))
        for name, lever in LEVERS.items()
    }
    varied = [name for name, lever in LEVERS.items() if lever.recipe == "each"]
    found = [
        make(spec, method, {**common, name: choice}, effective)
        for name in varied
        for choice in LEVERS[name].ranked(facts)
        if choice in choices[name]
    ]
    if not any(found):
        found = [make(spec, method, common | {name: choices[name][0] for name in varied}, effective)]
    return [one for one in found if one]


def changes(spec: JobSpec, found: Measurement, choices: Space) -> list[Configuration]:
    """The best found with one lever changed; less memory for more time only where memory holds the batch small."""
    best = found.configuration
    ranked = [
        (choice.change_rank, lever, choice.name)
        for lever in LEVERS.values()
        for choice in lever.choices
        if choice.change_rank is not None and not (lever.saves_memory and has_room(found))
    ]
    made = [
        make(spec, best.method, {**best.levers, lever.name: choice}, best.effective_batch_size)
        for _, lever, choice in sorted(ranked, key=lambda one: one[0])
        if choice in choices[lever.name] and best.levers[lever.name] != choice
    ]
    return [one for one in made if one]


def has_room(found: Measurement) -> bool:
    """Whether twice the fastest micro batch fits, so that memory is not what slows it down."""
    return 2 * (found.micro_batch_size or 1) <= (found.predicted_micro_batch or 0)

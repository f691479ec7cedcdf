"""The baseline: what transformers' Trainer does by default, or with the user's own TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.states import Origin
from service.levers import LEVERS
from service.levers.base import Asked, Lever
from service.scaling import ACCUMULATION, MICRO, baseline_batch, learning_rate
from service.space import possible
from worker.plan.proposers import Proposal
from worker.plan.view import View

TOO_LARGE = (
    "The baseline did not fit at its micro batch of {micro}, so smaller ones are tried: the fastest that fits counts, "
    "if any does."
)


class Baseline:
    """Proposes each method's baseline before anything else, since all trials are compared with it.

    Where it does not fit at the user's micro batch, it is proposed at the fastest that fits, as a user would lower it.
    """

    order, always = 0, True

    def propose(self, view: View) -> Proposal | None:
        """The baseline, or None if it was proposed before."""
        if view.baseline_request() is not None:
            return None
        configuration, notes = baseline(view.spec, view.method, view.lacks, view.facts)
        if configuration.key in view.taken:
            notes = (TOO_LARGE.format(micro=configuration.micro_batch_size),)
            configuration = configuration.at_micro_batch(None)
        return Proposal(configuration, Origin.baseline, notes) if configuration.key not in view.taken else None


def baseline(
    spec: JobSpec, method: Method, lacks: Mapping[str, str], facts: HardwareFacts | None = None
) -> tuple[Configuration, tuple[str, ...]]:
    """(the baseline's configuration, sentences about it for the user).

    It has what transformers takes in the place of choices that the model or the hardware lacks. The sentences name
    these, and what it does not follow of the user's TrainingArguments.
    """
    mine: dict[str, Any] = spec.baseline if isinstance(spec.baseline, dict) else {}
    micro, accumulation = baseline_batch(spec)
    wanted = micro * accumulation
    effective = spec.training.effective_batch_size or wanted
    levers, notes, read = {}, [], {MICRO, ACCUMULATION}
    for name, lever in LEVERS.items():
        asked_for, lever_notes = _asked(lever, mine)
        if facts and (missing := lever.choice(asked_for).missing(facts, asked=True)):
            lever_notes = [
                f"The baseline has {name}={lever.baseline}, as {name}={asked_for} {missing}; the speed-up is over that."
            ]
            asked_for = lever.baseline
        levers[name] = possible(name, asked_for, lacks)
        notes += lever_notes
        if levers[name] != asked_for:
            lacked = f"{name}={asked_for}"
            notes.append(f"The baseline has {name}={levers[name]}, as {lacked} cannot be: {lacks[lacked]}.")
        read |= {argument for asked, _ in _ways(lever) for argument in asked.arguments}
    left_out = sorted(set(mine) - read)
    if left_out:
        notes.append(f"Of the baseline's arguments these were not taken into account: {', '.join(left_out)}.")
    if mine and wanted != effective:
        notes.append(
            f"The baseline's effective batch of {wanted} became the job's {effective}, so that both do the same work."
        )
    configuration = Configuration(
        method=method,
        levers=levers,
        effective_batch_size=effective,
        learning_rate=learning_rate(spec, method, effective, levers["optimizer"]),
        micro_batch_size=min(micro, effective),
    )
    return configuration, tuple(notes)


def _ways(lever: Lever) -> list[tuple[Asked, str]]:
    """(TrainingArguments that ask for a choice, the choice's name) for all choices of a lever."""
    return [(asked, choice.name) for choice in lever.choices for asked in choice.asked_by]


def _asked(lever: Lever, mine: dict[str, Any]) -> tuple[str, list[str]]:
    """(the choice that a user's arguments ask for, or else the lever's baseline; sentences about it for the user).

    Where the arguments ask for several choices, the one that needs the most arguments counts, of these the last.
    """
    ways = _ways(lever)
    held = [
        (len(asked.arguments), at, asked.note, choice) for at, (asked, choice) in enumerate(ways) if asked.holds(mine)
    ]
    if held:
        *_, note, choice = max(held)
        return choice, [note] if note else []
    named = {argument for asked, _ in ways for argument, value in asked.arguments.items() if isinstance(value, str)}
    return lever.baseline, [
        f"The baseline's {argument}={mine[argument]} is not in the catalogue, so {lever.baseline} was measured "
        "instead; the speed-up is over that."
        for argument in sorted(named & set(mine))
    ]


PROPOSER = Baseline()

"""The baseline: what a Trainer user gets without thinking, or the user's own TrainingArguments."""

from __future__ import annotations

from typing import Any

from service.contract.configuration import Configuration
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement
from service.levers import LEVERS, chosen
from service.levers.base import Asked, Lever
from worker.plan.space import TRAINER_BATCH, learning_rate

MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"


def baseline(spec: JobSpec, method: Method) -> tuple[Configuration, tuple[str, ...]]:
    """(configuration, notes on what was left out of the user's arguments)."""
    mine: dict[str, Any] = spec.baseline if isinstance(spec.baseline, dict) else {}
    micro = int(mine.get(MICRO, TRAINER_BATCH))
    wanted = micro * int(mine.get(ACCUMULATION, 1))
    effective = spec.training.effective_batch_size or wanted
    levers, notes, read = {}, [], {MICRO, ACCUMULATION}
    for name, lever in LEVERS.items():
        levers[name], lever_notes = _asked(lever, mine)
        notes += lever_notes
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
        learning_rate=learning_rate(spec, effective),
        micro_batch_size=min(micro, effective),
    )
    return configuration, tuple(notes)


def _ways(lever: Lever) -> list[tuple[Asked, str]]:
    """All ways to ask for a choice of a lever, with the choice."""
    return [(asked, choice.name) for choice in lever.choices for asked in choice.asked_by]


def _asked(lever: Lever, mine: dict[str, Any]) -> tuple[str, list[str]]:
    """(the choice that a user's arguments ask for, or the baseline; notes on it).

    Of several the one that looks at the most arguments; of these the last, where choices are asked for alike.
    """
    ways = _ways(lever)
    held = [
        (len(asked.arguments), at, asked.note, choice)
        for at, (asked, choice) in enumerate(ways)
        if all(_says(mine.get(argument), value) for argument, value in asked.arguments.items())
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


def _says(mine: Any, wanted: Any) -> bool:
    """Whether an argument has a wanted value; a flag may be anything that counts as true."""
    return bool(mine) if wanted is True else bool(mine == wanted)


def precise(measurement: Measurement) -> bool:
    """Whether it computes in fp32, so that others can be held to its numbers exactly."""
    rounded = any(choice.changes_numerics for choice in chosen(measurement.configuration.levers))
    return not rounded and measurement.weights_dtype in (None, "float32")


def reference_of(measured: Measurement) -> Measurement | None:
    """The baseline with fp32 master weights, for losses to be compared with, or None where it has them.

    Trained in a checkpoint's 16 bits throughout, the baseline itself drifts (pure bf16: 3.6e-2 in 40 steps), and
    better configurations would be the ones to look wrong. Adapters are kept in fp32 in any case.
    """
    configuration = measured.configuration
    if configuration.method != "full" or measured.weights_dtype in (None, "float32"):
        return None
    levers = configuration.levers | {name: lever.reference for name, lever in LEVERS.items() if lever.reference}
    # Half the micro batch: four bytes a weight have to fit where two did.
    micro = max(1, (measured.micro_batch_size or 2) // 2)
    changed = configuration.model_copy(update={"levers": levers, "micro_batch_size": micro})
    return measured.model_copy(update={"configuration": changed, "micro_batch_size": micro})

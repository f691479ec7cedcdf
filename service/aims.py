"""What to take instead of the best configuration for another aim, and when compiling pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from service.contract.configuration import Configuration
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement
from service.contract.objective import (
    NO_BASELINES,
    SMALLEST_WITHIN,
    counted_seconds,
    fastest_first,
    minimises_memory,
    ranked,
)
from service.contract.recommendation import Instead
from service.levers import chosen, is_compiled


def _compiles_nothing(one: Measurement) -> bool:
    return not is_compiled(one.configuration.levers)


def _rounds_nothing(one: Measurement) -> bool:
    return not any(choice.changes_numerics for choice in chosen(one.configuration.levers))


def _is_plain(one: Measurement) -> bool:
    return not any(choice.not_expressible for choice in chosen(one.configuration.levers))


# Aim -> (what it is, which configurations have it); the best of these by the job's objective is named.
AIMS: dict[str, tuple[str, Callable[[Measurement], bool]]] = {
    "no-compile": ("that compiles nothing, so that it starts at once", _compiles_nothing),
    "exact-numerics": ("of which no lever changes how numbers are rounded", _rounds_nothing),
    "plain-arguments": ("that TrainingArguments can say without train.py", _is_plain),
}
LEAST_MEMORY, FASTEST = "least-memory", "fastest"


def instead(
    spec: JobSpec,
    best: Measurement,
    good: Iterable[Measurement],
    baselines: Mapping[Method, Measurement] = NO_BASELINES,
) -> tuple[Instead, ...]:
    """For each aim that the best configuration does not serve, the best that does, by their single trials."""
    order = ranked(spec, list(good), baselines)
    mine = [one for one in order if one.configuration.method == best.configuration.method]
    which = "the one with the least memory" if minimises_memory(spec) else "the fastest"
    found = []
    for aim, (meaning, serves) in AIMS.items():
        other = next((one for one in mine if serves(one)), None)
        if other is not None and not serves(best):
            found.append(_of(spec, aim, f"{which} {meaning}", best, other))
    if minimises_memory(spec):
        quick = next(iter(fastest_first(spec, mine)), best)
        if counted_seconds(spec, quick) * (1 + SMALLEST_WITHIN) < counted_seconds(spec, best):
            found.append(_of(spec, FASTEST, "the fastest, whatever memory it takes", best, quick))
        return tuple(found)
    sized = [one for one in mine if one.peak_bytes is not None]
    slim = min(sized, key=lambda one: (one.peak_bytes, counted_seconds(spec, one)), default=None)
    if slim is not None and best.peak_bytes is not None and (slim.peak_bytes or 0) < best.peak_bytes:
        found.append(_of(spec, LEAST_MEMORY, "the one that takes the least memory", best, slim))
    return tuple(found)


def _is_like(one: Measurement, mine: Configuration) -> bool:
    """Whether both have the same method and optimizer steps of the same size."""
    its = one.configuration
    return (its.method, its.effective_batch_size) == (mine.method, mine.effective_batch_size)


def _of(spec: JobSpec, aim: str, meaning: str, best: Measurement, other: Measurement) -> Instead:
    return Instead(
        aim=aim,
        meaning=meaning,
        levers=other.configuration.levers,
        micro_batch_size=other.micro_batch_size or 1,
        effective_batch_size=other.configuration.effective_batch_size,
        speed=counted_seconds(spec, best) / counted_seconds(spec, other),
        tokens_per_second=other.tokens_per_second,
        peak_bytes=other.peak_bytes,
    )


def break_even(spec: JobSpec, best: Measurement, good: Iterable[Measurement]) -> str | None:
    """From how many steps on compiling pays, beside the fastest that compiles nothing; None without either."""
    if _compiles_nothing(best):
        return None
    mine = best.configuration
    eager = next(
        (one for one in fastest_first(spec, list(good)) if _compiles_nothing(one) and _is_like(one, mine)), None
    )
    rows = best.dataset.rows if best.dataset else None
    if eager is None or rows is None or best.timing is None or eager.timing is None:
        return None
    effective = mine.effective_batch_size
    gain = effective * (eager.timing.seconds / eager.timing.samples - best.timing.seconds / best.timing.samples)
    if gain <= 0:
        return None
    steps = math.ceil(best.compile_seconds / gain)
    whole = math.ceil(spec.training.epochs * math.ceil(rows / effective))
    return (
        f"Compiling takes {best.compile_seconds:.0f} s once and pays from {steps:,} optimizer steps on, beside the "
        f"fastest configuration that compiles nothing; this run has {whole:,}."
    )

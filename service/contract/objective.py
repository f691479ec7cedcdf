"""What `fastest` means: the seconds that the user's own run would take, computed from a measurement. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Timing

SMALLEST_WITHIN = 0.01  # of the fastest's seconds: so close to it, the smaller batch or the simpler one is preferred


def training_seconds(spec: JobSpec, measurement: Measurement, timing: Timing | None = None) -> float:
    """Seconds of all optimizer steps of the run: epochs x rows at the pace at which the work unit was trained."""
    timing = timing or measurement.timing
    rows = measurement.dataset.rows if measurement.dataset else None
    if timing is None or rows is None:
        return float("inf")
    return spec.training.epochs * rows / timing.samples * timing.seconds


def run_seconds(spec: JobSpec, measurement: Measurement, timing: Timing | None = None) -> float:
    """Wall-clock seconds of the run: loading and compiling once, and all optimizer steps."""
    return measurement.once_seconds + training_seconds(spec, measurement, timing)


def score(spec: JobSpec, measurement: Measurement, timing: Timing | None = None) -> float:
    """The job's objective in seconds, of which less is better; infinite without a timing."""
    measure = run_seconds if spec.search.objective == "wall-clock" else training_seconds
    return measure(spec, measurement, timing)


def ranked(spec: JobSpec, measurements: list[Measurement]) -> list[Measurement]:
    """The measurements, fastest first.

    Where the job gives no effective batch, the smallest effective batch within 1% of the fastest comes first.
    """
    order = sorted(measurements, key=lambda one: (score(spec, one), one.configuration.key))
    if spec.training.effective_batch_size is not None:
        return order
    keys = [str(at) for at in range(len(order))]
    cost = {key: score(spec, order[int(key)]) for key in keys}
    sizes = {key: (order[int(key)].configuration.effective_batch_size,) for key in keys}
    return [order[int(key)] for key in smallest_within(keys, cost, sizes)]


def smallest_within(order: list[str], cost: dict[str, float], sizes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """`order` (cheapest first) with the one of the smallest size within 1% of the cheapest put first."""
    if not order:
        return order
    near = [key for key in order if cost[key] <= cost[order[0]] * (1 + SMALLEST_WITHIN)]
    smallest = min(near, key=lambda key: (sizes[key], cost[key]))
    return [smallest, *(key for key in order if key != smallest)]

"""What `fastest` means: the seconds of the user's own run, from a measurement. Pure."""

from __future__ import annotations

from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Timing

SMALLEST_WITHIN = 0.01


def training_seconds(spec: JobSpec, measurement: Measurement, timing: Timing | None = None) -> float:
    """Seconds of all optimizer steps of the run: epochs x rows at the work unit's pace."""
    timing = timing or measurement.timing
    rows = measurement.dataset.rows if measurement.dataset else None
    if timing is None or rows is None:
        return float("inf")
    return spec.training.epochs * rows / timing.samples * timing.seconds


def run_seconds(spec: JobSpec, measurement: Measurement, timing: Timing | None = None) -> float:
    """Wall-clock of the run: load and compile once, then all optimizer steps."""
    once = measurement.load_seconds + measurement.compile_seconds
    return once + training_seconds(spec, measurement, timing)


def score(spec: JobSpec, measurement: Measurement) -> float:
    """The job's objective, in seconds; lower is better, infinite without a timing."""
    measure = run_seconds if spec.search.objective == "wall-clock" else training_seconds
    return measure(spec, measurement)


def ranked(spec: JobSpec, measurements: list[Measurement]) -> list[Measurement]:
    """Fastest first. With the effective batch unset, the smallest within 1% of the fastest leads."""
    order = sorted(measurements, key=lambda one: (score(spec, one), one.configuration.key))
    if spec.training.effective_batch_size is None and order:
        limit = score(spec, order[0]) * (1 + SMALLEST_WITHIN)
        near = [one for one in order if score(spec, one) <= limit]
        smallest = min(near, key=lambda one: (one.configuration.effective_batch_size, score(spec, one)))
        order.remove(smallest)
        order.insert(0, smallest)
    return order

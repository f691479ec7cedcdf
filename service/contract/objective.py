"""What `best` means: by the job's objective the least time, money or memory of the user's own run. Pure.

Everything is computed from measurements: the seconds of the user's run, its price, or the peak of its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement, Outcome, Timing, Verdict
from service.contract.states import ProbePhase

# A share of the least seconds or bytes. Two configurations that are as close count as equal, and the smaller batch or
# the simpler one is preferred. With the objective memory, what is slower than the baseline by no more counts as not
# slower.
SMALLEST_WITHIN = 0.01
NO_BASELINES: Mapping[Method, Measurement] = {}


def minimises_memory(spec: JobSpec) -> bool:
    """Whether the job asks for the least memory, and not for the least time or what that costs."""
    return spec.search.objective == "memory"


def counts_once(spec: JobSpec) -> bool:
    """Whether what a run takes beside its steps counts, such as loading: in all objectives but throughput."""
    return spec.search.objective != "throughput"


def training_seconds(spec: JobSpec, measurement: Measurement, timing: Timing | None = None) -> float:
    """Seconds of all optimizer steps of the run: epochs x tokens at the pace at which the work unit was trained.

    The last step counts in full where the epochs end within it.
    """
    timing = timing or measurement.timing
    if timing is None or measurement.dataset is None:
        return float("inf")
    steps = steps_of(spec, measurement.dataset.rows, measurement.configuration.effective_batch_size)
    return training_seconds_of(spec, measurement.dataset.tokens, timing) * math.ceil(steps) / steps


def steps_of(spec: JobSpec, rows: int, effective: int) -> float:
    """How many optimizer steps the run's epochs are, with so many training rows and samples a step."""
    return spec.training.epochs * math.ceil(rows / effective)


def training_seconds_of(spec: JobSpec, tokens: int, timing: Timing) -> float:
    """The seconds of all optimizer steps on data of so many tokens, at the timing's tokens/s.

    By tokens and not by rows, as the rows of a work unit may be longer than those of the data on average.
    """
    return spec.training.epochs * tokens / timing.tokens * timing.seconds


def evaluations(spec: JobSpec, rows: int, effective: int) -> int:
    """How often the run evaluates, with so many training rows and samples a step: as asked for, and at its end."""
    steps, every = math.ceil(steps_of(spec, rows, effective)), spec.training.evaluation_steps
    return 1 + ((steps - 1) // every if every else 0)


def evaluating_seconds(spec: JobSpec, measurement: Measurement) -> float:
    """Seconds of all evaluations of the run; 0 where they take so little of it that no trial timed them."""
    if measurement.evaluation_seconds is None or measurement.dataset is None:
        return 0.0
    effective = measurement.configuration.effective_batch_size
    return measurement.evaluation_seconds * evaluations(spec, measurement.dataset.rows, effective)


def seconds_beside(spec: JobSpec, measurement: Measurement) -> float:
    """Seconds of the run beside its optimizer steps: loading and compiling once, and its evaluations."""
    return measurement.once_seconds + evaluating_seconds(spec, measurement)


def run_seconds(spec: JobSpec, measurement: Measurement, timing: Timing | None = None) -> float:
    """Wall-clock seconds of the run: loading and compiling once, all optimizer steps, and all evaluations."""
    return seconds_beside(spec, measurement) + training_seconds(spec, measurement, timing)


def counted_seconds(spec: JobSpec, measurement: Measurement, timing: Timing | None = None) -> float:
    """The seconds by which the job tells faster from slower, whatever its objective; infinite without a timing."""
    return (run_seconds if counts_once(spec) else training_seconds)(spec, measurement, timing)


def score(spec: JobSpec, measurement: Measurement) -> float:
    """The job's objective, of which less is better: peak bytes, or else seconds; infinite where it was not measured.

    What the run costs grows with its seconds, so that seconds order by the cost as well.
    """
    if not minimises_memory(spec):
        return counted_seconds(spec, measurement)
    return float("inf") if measurement.peak_bytes is None else float(measurement.peak_bytes)


def is_slower(spec: JobSpec, measurement: Measurement, baseline: Measurement | None) -> bool:
    """Whether the objective memory rules a measurement out, as the run would take longer than with the baseline.

    Nothing is ruled out where no baseline ran, or by another objective.
    """
    if not minimises_memory(spec) or baseline is None:
        return False
    return is_too_slow(counted_seconds(spec, baseline) / counted_seconds(spec, measurement))


def is_too_slow(speedup: float | None) -> bool:
    """Whether a run is slower than the baseline by more than SMALLEST_WITHIN, by its speed-up over it.

    False for None, which means that no baseline ran.
    """
    return speedup is not None and speedup * (1 + SMALLEST_WITHIN) < 1


def least_disturbed(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The successful measurements, one of each configuration: of a repeated one, the one that others disturbed least.

    All who judge trials take these, so that what was verified is what is recommended: the micro batch that was found
    may differ from one measurement of a configuration to the next.
    """
    found: dict[str, Measurement] = {}
    for one in measurements:
        before = found.get(one.configuration.key)
        if one.outcome is Outcome.ok and (before is None or _known_clean(one) >= _known_clean(before)):
            found[one.configuration.key] = one
    return list(found.values())


def _known_clean(measurement: Measurement) -> float:
    return (measurement.timing.clean_share or 0.0) if measurement.timing else 0.0


def ranked(
    spec: JobSpec, measurements: Sequence[Measurement], baselines: Mapping[Method, Measurement] = NO_BASELINES
) -> list[Measurement]:
    """The measurements, best first. `baselines` (method -> its measurement) matter to the objective memory only.

    With that, those within 1% of the least peak come first, the fastest of them before the others; then the others by
    their peak; and last those that are slower than their method's baseline.
    """
    if not minimises_memory(spec):
        return fastest_first(spec, measurements)
    slow: list[Measurement] = []
    left: list[Measurement] = []
    for one in measurements:
        (slow if is_slower(spec, one, baselines.get(one.configuration.method)) else left).append(one)
    left.sort(key=lambda one: (score(spec, one), counted_seconds(spec, one), one.configuration.key))
    most = score(spec, left[0]) * (1 + SMALLEST_WITHIN) if left else 0.0
    count = sum(score(spec, one) <= most for one in left)
    return [*fastest_first(spec, left[:count]), *left[count:], *fastest_first(spec, slow)]


def fastest_first(spec: JobSpec, measurements: Sequence[Measurement]) -> list[Measurement]:
    """The measurements, fastest first.

    Where the job gives no effective batch, the smallest effective batch within 1% of the fastest comes first.
    """
    order = sorted(measurements, key=lambda one: (counted_seconds(spec, one), one.configuration.key))
    if spec.training.effective_batch_size is not None:
        return order
    keys = [str(at) for at in range(len(order))]
    cost = {key: counted_seconds(spec, order[int(key)]) for key in keys}
    sizes = {key: (order[int(key)].configuration.effective_batch_size,) for key in keys}
    return [order[int(key)] for key in smallest_within(keys, cost, sizes)]


def smallest_within(order: list[str], cost: dict[str, float], sizes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """`order` (cheapest first) with the one of the smallest size within 1% of the cheapest put first."""
    if not order:
        return order
    near = [key for key in order if cost[key] <= cost[order[0]] * (1 + SMALLEST_WITHIN)]
    smallest = min(near, key=lambda key: (sizes[key], cost[key]))
    return [smallest, *(key for key in order if key != smallest)]


def proven_peak(measurement: Measurement, verdict: Verdict | None) -> int | None:
    """Peak bytes of a configuration after its verification, or None where they are not known.

    It is the larger one of the trial's peak and the soak's. Where the soak lowered the micro batch, the trial's peak is
    that of a larger one, and the peak that the probe saw at the lower size takes its place.
    """
    if verdict is None:
        return measurement.peak_bytes
    if verdict.micro_batch_size is None:
        seen = [measurement.peak_bytes]
    else:
        seen = [
            probe.peak_bytes
            for probe in measurement.probes
            if probe.micro_batch_size == verdict.micro_batch_size and probe.phase is not ProbePhase.evaluation
        ]
    if verdict.soak:
        seen.append(verdict.soak.peak_bytes)
    return max((peak for peak in seen if peak is not None), default=None)

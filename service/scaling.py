"""How the learning rate goes with the effective batch, and whether a larger batch than the user's would pay. Pure."""

from __future__ import annotations

from math import prod
from typing import Any

from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement, Timing, Verdict
from service.contract.objective import counted_seconds, minimises_memory

LEAST_STEPS_AN_EPOCH = 50  # with the largest effective batch that is tried or named
# How many times as large a batch is named. The cost of a micro batch is extrapolated badly beyond twice what was timed.
LARGER = 2
# How many times as fast it must be to be named: twice the 5% within which a verification tells speed-ups, as what is
# predicted from a curve may be off by a few percent itself.
CLEARLY_FASTER = 1.1
NOT_ADAPTIVE = ("sgd",)  # choices of the lever `optimizer`
TRAINER_BATCH = 8  # TrainingArguments.per_device_train_batch_size
MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"


def baseline_batch(spec: JobSpec) -> tuple[int, int]:
    """(samples of a micro batch, micro batches of a step) of the user's own TrainingArguments, or of Trainer's."""
    mine: dict[str, Any] = spec.baseline if isinstance(spec.baseline, dict) else {}
    return int(mine.get(MICRO, TRAINER_BATCH)), int(mine.get(ACCUMULATION, 1))


def asked_batch(spec: JobSpec) -> int:
    """The effective batch that the user's learning rate is for: the one they set, else that of the baseline."""
    return spec.training.effective_batch_size or prod(baseline_batch(spec))


def learning_rate(spec: JobSpec, method: Method, effective: int, optimizer: str) -> float:
    """The method's learning rate, scaled to another effective batch than the one that it is for."""
    return scaled(spec.training.rate(method), effective / asked_batch(spec), optimizer)


def scaled(rate: float, ratio: float, optimizer: str = "adamw") -> float:
    """The learning rate for an effective batch that is `ratio` times as large.

    Adaptive optimizers need the square root of the ratio (Malladi et al. 2022, arXiv 2205.10287), plain gradient
    descent the ratio itself (Goyal et al. 2017, arXiv 1706.02677).
    """
    return float(f"{rate * ratio ** (1.0 if optimizer in NOT_ADAPTIVE else 0.5):.6g}")


def larger_batch(spec: JobSpec, best: Measurement, verdict: Verdict | None = None) -> str | None:
    """A sentence about twice the user's effective batch, where the run is predicted to be clearly faster with it.

    It is only said: what the user asked to learn is what is learnt. None where the user gave no effective batch, as the
    search chooses it then; where so large a batch would leave too few steps; and where the memory is what counts.
    """
    effective, rows = spec.training.effective_batch_size, best.dataset.rows if best.dataset else 0
    if effective is None or minimises_memory(spec) or not best.timing:
        return None
    if rows // (LARGER * effective) < LEAST_STEPS_AN_EPOCH:
        return None
    timing, sources = best.timing, []
    seconds = timing.seconds
    if timing.update_seconds:
        seconds -= timing.update_seconds * (1 - 1 / LARGER)
        sources.append(f"half as many optimizer updates, which take {timing.update_seconds / timing.seconds:.0%} of it")
    is_lowered = verdict is not None and verdict.micro_batch_size is not None  # as the soak had too little memory
    if not is_lowered and (gain := _saved_by_larger_micro_batch(spec, best)):
        saved, smaller = gain
        seconds -= saved
        micro = timing.micro_batch_size
        sources.append(f"a micro batch of {LARGER * micro}, by those of {smaller} and {micro} that were timed")
    faster = counted_seconds(spec, best) / counted_seconds(spec, best, timing.model_copy(update={"seconds": seconds}))
    if faster < CLEARLY_FASTER:
        return None
    optimizer, rate = best.configuration.levers["optimizer"], best.configuration.learning_rate
    rule = f"in proportion, as {optimizer} is not adaptive" if optimizer in NOT_ADAPTIVE else "by the square root of 2"
    return (
        f"An effective batch of {LARGER * effective} instead of {effective} is predicted to make the run {faster:.2f} "
        f"times as fast, with a learning rate of {scaled(rate, LARGER, optimizer):g} (scaled {rule}). It was not "
        f"measured: it is predicted from the time of the work unit ({'; '.join(sources)}). It is not part of this "
        "answer, as it changes what is learnt."
    )


def _saved_by_larger_micro_batch(spec: JobSpec, best: Measurement) -> tuple[float, int] | None:
    """(seconds of the unit that a micro batch twice as large saves, the smaller size by which that is predicted).

    None where it would not be larger, as the step is accumulated already; where it is not known to fit in memory; and
    where no smaller size was timed within a factor of 4. What a micro batch takes is assumed to be a part that each
    takes and one that grows with its samples.
    """
    timing, line = best.timing, best.memory_line
    if timing is None or best.gradient_accumulation_steps != 1 or line is None or not best.capacity_bytes:
        return None
    micro = timing.micro_batch_size
    smaller = [one for one in best.curve if micro / 4 <= one.micro_batch_size < micro]
    most = spec.search.max_micro_batch_size
    if not smaller or line.at(LARGER * micro) > best.capacity_bytes or (most and LARGER * micro > most):
        return None
    nearest = max(smaller, key=lambda one: one.micro_batch_size)
    a_batch = (_computing(nearest) - _computing(timing)) / (1 / nearest.micro_batch_size - 1 / micro)
    saved = a_batch * (1 / micro - 1 / (LARGER * micro))
    return (saved, nearest.micro_batch_size) if saved > 0 else None


def _computing(timing: Timing) -> float:
    """The seconds of the unit without its updates, which hardly depend on the micro batch."""
    return timing.seconds - (timing.update_seconds or 0.0)

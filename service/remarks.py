"""Sentences about an answer, beside its figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from service.aims import break_even
from service.contract.job import JobSpec
from service.contract.measurement import DRIFT, Measurement
from service.contract.objective import SMALLEST_WITHIN, counted_seconds, minimises_memory
from service.contract.recommendation import Winner
from service.headline import sentence
from service.levers.batching import ACROSS_STEPS
from service.scaling import NOT_ADAPTIVE, asked_batch, larger_batch

# Training diverges where the loss of a soak's last fifth is so many times that of an earlier fifth, and higher by so
# many nats: a model that knows the data has a loss near 0, of which 1.3 times is little. The loss of the untouched
# weights is of a few short samples, so that more has to lie between. All four are chosen, not measured. If they are far
# smaller, losses that differ by their batches alone are called a divergence. If they are far larger, none is told: a
# classifier of two classes that collapses ends at 0.69 nats, which is told where its loss had come below 0.29.
RISEN, LEAST_RISE = 1.3, 0.4
RISEN_FROM_FIRST, LEAST_FROM_FIRST = 1.5, 1.0


def remarks(
    spec: JobSpec, best: Winner, winners: Iterable[Winner], verified: Measurement, sound: Sequence[Measurement]
) -> tuple[str, ...]:
    """What a user should know of the best of the methods' `winners`.

    `verified` is the best one's measurement as its verification left it, `sound` are those that may be recommended.
    """
    measurement, batching = best.evidence.measurement, best.configuration.levers["batching"]
    found: list[str | None] = [sentence(spec, best.evidence), _diverging(best)]
    found += [*measurement.notes, _drawn(measurement.adapter_saves)]
    if spec.training.effective_batch_size is None:
        found.append(_chosen_batch(spec, best, sound))
    if batching in ACROSS_STEPS:
        found.append(f"Batching {batching!r} arranges samples across steps: every sample is seen, in another order.")
    if batching == "packed-global":
        found.append(
            "The steps of packed-global have the effective batch in the mean: a few long samples, or up to twice as "
            "many short ones."
        )
    found += [break_even(spec, verified, sound), larger_batch(spec, measurement, best.stability.verdict)]
    found += [_minutes_apart(spec, best, other) for other in winners if other is not best]
    return tuple(one for one in found if one)


def _diverging(best: Winner) -> str | None:
    """That what the soak had learnt was lost: the job's own settings diverge, with the baseline as with the answer."""
    verdict, before = best.stability.verdict, best.evidence.measurement.check_loss
    soak = verdict.soak if verdict else None
    if soak is None or before is None or soak.last_loss is None:
        return None
    after, lowest = soak.last_loss, soak.last_loss if soak.lowest_loss is None else soak.lowest_loss
    if after > max(before * RISEN_FROM_FIRST, before + LEAST_FROM_FIRST):
        rose = f"the loss was {before:.3g} before the first step"
    elif after > max(lowest * RISEN, lowest + LEAST_RISE):
        rose = f"the loss had come down to {lowest:.3g}"
    else:
        return None
    return (
        f"Training diverges with these settings: {rose}, and was {after:.3g} at the end of the soak of {soak.steps} "
        f"steps. Speeds and memory hold; look at the learning rate, which is {best.configuration.learning_rate:g}, "
        "before you train."
    )


def _drawn(layers: Sequence[str]) -> str | None:
    """That the checkpoint lacks layers beside the head, which may be the user's mistake."""
    if not layers:
        return None
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return (
        f"The checkpoint has no weights of {', '.join(layers[:3])}{more}: they are drawn at random, trained whole as "
        "the head is, and saved with the adapter."
    )


def _chosen_batch(spec: JobSpec, best: Winner, sound: Sequence[Measurement]) -> str:
    """Where no effective batch was given, the one that the search chose, and what that does to the learning rate."""
    chosen, now = best.configuration, best.configuration.learning_rate
    given = spec.training.rate(chosen.method)
    said = f"No effective batch was given: the search chose {chosen.effective_batch_size}"
    mine = {one.configuration.key: one for one in sound if one.configuration.method == chosen.method}
    most = min((counted_seconds(spec, one) for one in mine.values()), default=0.0) * (1 + SMALLEST_WITHIN)
    near = [one.configuration.effective_batch_size for one in mine.values() if counted_seconds(spec, one) <= most]
    is_near = best.evidence.measurement.configuration.key in mine and chosen.effective_batch_size == min(near)
    if not minimises_memory(spec) and is_near and counted_seconds(spec, best.evidence.measurement) <= most:
        said += ", the smallest within 1% of the fastest"
    if now == given:
        which = f"the default of {chosen.method}" if spec.training.learning_rate is None else "as given"
        return f"{said}; the learning rate is {now:g}, {which}."
    rule = "by the ratio of the batches" if chosen.levers["optimizer"] in NOT_ADAPTIVE else "by the square root of that"
    return f"{said}; the learning rate went from {given:g} (at {asked_batch(spec)}) to {now:g}, {rule}."


def _minutes_apart(spec: JobSpec, best: Winner, other: Winner) -> str | None:
    """That the order of two methods is in doubt, where both were verified and are about as fast."""
    ours, theirs = best.stability.verdict, other.stability.verdict
    if minimises_memory(spec) or not (ours and theirs and ours.timing and theirs.timing):
        return None
    seconds = counted_seconds(spec, other.evidence.measurement, theirs.timing)
    times = seconds / counted_seconds(spec, best.evidence.measurement, ours.timing)
    if not 1.0 <= times <= DRIFT:
        return None
    return (
        f"With {other.configuration.method} it takes {times:.2f} times as long as with {best.configuration.method}, "
        "where the methods were verified one after the other and not in turns, so that their order is not sure."
    )

"""Finds the largest micro batch that fits: two small full steps give a line, then predict, confirm, correct.

A full step is forward, backward, clipping and an optimizer step whose state is allocated, at the worst case the
batching can make: the longest row as often as the micro batch has rows, packed rows full. The learning rate is 0
meanwhile, so the weights stay as they are. An out-of-memory error is reported and ends the child; the next child
goes on from what is known.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from service.contract.measurement import Probe
from worker.tasks.base import Batch
from worker.trial import loop
from worker.trial.build import Bundle

KEPT_BACK = 0.03
WORTH_ANOTHER = 1.1


@dataclass
class Found:
    """What the probe learnt. `line` is (bytes at rest, bytes a micro batch)."""

    largest: int
    predicted: int
    limited_by: str
    line: tuple[float, float] | None = None
    probes: list[Probe] = field(default_factory=list)


@contextlib.contextmanager
def without_learning(bundle: Bundle) -> Iterator[None]:
    """Steps in here leave the weights as they are: the learning rate is 0."""
    rates = [group["lr"] for group in bundle.optimizer.param_groups]
    for group in bundle.optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(bundle.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def worst_case(bundle: Bundle, micro: int) -> tuple[Batch, int]:
    """The largest batch of `micro` rows that the job's data can make, and its number of loss terms."""
    data, length = bundle.data, bundle.spec.dataset.max_length
    longest = max(range(len(data.lengths)), key=lambda one: data.lengths[one])
    if bundle.configuration.levers["batching"] != "packed":
        rows = [[longest]] * micro
        return loop.collate(bundle, rows), micro * max(1, bundle.task.items(data.train[longest]))
    ids, labels = data.train[longest]
    half = length // 2
    times = -(-half // len(ids))
    # Two samples a row: with one, the block-diagonal mask that packing costs would not be made.
    first, second = ((ids * times)[:size] for size in (length - half, half))
    first_labels, second_labels = ((labels * times)[:size] for size in (length - half, half))
    row = [(first, first_labels), (second, [-100, *second_labels[1:]])]
    batch = bundle.task.collate([row] * micro, bundle.pad, packed=True)
    return batch, max(1, int((batch["labels"] != -100).sum()))


def bound(bundle: Bundle) -> tuple[int, str]:
    """The largest micro batch that makes sense, and what says so."""
    effective = bundle.configuration.effective_batch_size
    rows = bundle.data.facts.rows
    return (effective, "effective batch") if effective <= rows else (rows, "dataset size")


def full_step(bundle: Bundle, micro: int) -> None:
    """One step at the worst case."""
    batch, items = worst_case(bundle, micro)
    loop.optimizer_step(bundle, [batch], items)


def measure_peak(bundle: Bundle, micro: int, begun: Callable[[int], None]) -> Probe:
    """Peak bytes of a full step of `micro`; the out-of-memory error passes through."""
    begun(micro)
    bundle.device.reset_peak()
    started = time.perf_counter()
    full_step(bundle, micro)
    bundle.device.synchronize()
    return Probe(micro_batch_size=micro, peak_bytes=bundle.device.peak(), seconds=time.perf_counter() - started)


def largest(
    bundle: Bundle,
    begun: Callable[[int], None],
    done: Callable[[Probe], None],
    confirm: bool = True,
    failed_at: int | None = None,
) -> Found:
    """Probe up to the bound. `failed_at` ran out of memory before; without `confirm` the prediction is not run."""
    limit, limited_by = bound(bundle)
    if failed_at is not None and failed_at <= limit:
        limit, limited_by = failed_at - 1, "memory"
    found = Found(0, 0, limited_by)
    if limit < 1:
        return found

    def probe(micro: int) -> Probe:
        result = measure_peak(bundle, micro, begun)
        done(result)
        found.probes.append(result)
        found.largest = max(found.largest, micro)
        return result

    bundle.device.exact_memory(True)
    try:
        with without_learning(bundle):
            begun(1)
            full_step(bundle, 1)  # the optimizer's state is made here, so that both points have it
            first = probe(1)
            if limit >= 2:
                second = probe(2)
                slope = max(1.0, float((second.peak_bytes or 0) - (first.peak_bytes or 0)))
                found.line = (float(first.peak_bytes or 0) - slope, slope)
                found.predicted = _predict(bundle, found, limit)
                if confirm:
                    _climb(bundle, found, limit, probe)
    finally:
        bundle.device.exact_memory(False)
    found.predicted = max(found.predicted, found.largest)
    if found.predicted < bound(bundle)[0]:
        found.limited_by = "memory"
    return found


def _predict(bundle: Bundle, found: Found, limit: int) -> int:
    """The largest micro batch by the line, a little kept back, within the limit."""
    assert found.line is not None
    rest, slope = found.line
    return min(limit, math.floor((bundle.device.capacity() * (1 - KEPT_BACK) - rest) / slope))


def _climb(bundle: Bundle, found: Found, limit: int, probe: Callable[[int], Probe]) -> None:
    """Predict from the line, confirm, and correct it by what was seen, until the prediction is what was run."""
    for _ in range(2):
        predicted = _predict(bundle, found, limit)
        if predicted <= found.largest * (WORTH_ANOTHER if found.largest > 2 else 1):
            return
        before = found.probes[-1]
        now = probe(predicted)
        steps = now.micro_batch_size - before.micro_batch_size
        slope = max(1.0, ((now.peak_bytes or 0) - (before.peak_bytes or 0)) / steps)
        found.line = (float(now.peak_bytes or 0) - slope * now.micro_batch_size, slope)


def fits(bundle: Bundle, micro: int, begun: Callable[[int], None]) -> None:
    """Run the worst case of `micro` as it will be timed, learning rate 0; the out-of-memory error passes through."""
    begun(micro)
    with without_learning(bundle):
        full_step(bundle, micro)
        bundle.device.synchronize()

"""Runs what is timed once before, so that no timing holds the first use of memory, of a shape or of compiled code."""

from __future__ import annotations

import math
import time

from training.samples import MicroBatch
from worker.child import probe, steps
from worker.child.arrange import shape_of
from worker.child.timing import Unit


def warm(unit: Unit, deadline: float | None = None) -> None:
    """Take a step of one micro batch of each shape that the unit has, the largest first.

    The largest alone is enough where neither the device nor compiled code has a slower first call of each shape. The
    learning rate is 0; the optimizer keeps its memory and forgets what it has seen. No step begins after `deadline` (of
    time.perf_counter). The unit remembers what it took, see `Unit.first_calls`.
    """
    bundle, device = unit.bundle, unit.bundle.device
    chosen = _distinct(unit)
    if not device.first_call_per_shape and not bundle.compiled:
        chosen = chosen[:1]
    begun = device.mark()
    with probe.without_learning(bundle):
        for micro in chosen:
            batches, terms, _ = steps.prepare(bundle, [micro])
            unit.warmed += [tuple(batch["input_ids"].shape) for batch in batches]
            steps.optimizer_step(bundle, batches, terms)
            device.synchronize()
            if deadline is not None and time.perf_counter() > deadline:
                break
    ended = device.mark()
    device.synchronize()
    unit.warm_seconds += device.between(begun, ended)
    steps.forget(bundle)


def _distinct(unit: Unit) -> list[MicroBatch]:
    """A micro batch of each padded shape of the unit, the largest shape first."""
    lengths, recipe = unit.bundle.data.lengths, unit.bundle.recipe
    of_shape: dict[tuple[int, int], MicroBatch] = {}
    for micro in (micro for step in unit.plan for micro in step):
        of_shape.setdefault(shape_of(micro, lengths, recipe), micro)
    return [of_shape[shape] for shape in sorted(of_shape, key=lambda one: (-math.prod(one), one))]

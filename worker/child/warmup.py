"""Runs once beforehand what is timed, so that no timing has the first use of memory, a shape or compiled code."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from service.levers.compile import GRAPHS
from training.samples import MicroBatch, Step
from worker.child import probe, steps
from worker.child.arrange import shape_of
from worker.child.timing import Unit

# A shape's first call runs without a graph, the second records it, which empties the allocator's cache, and only the
# third replays it (torch 2.13, _inductor/cudagraph_trees.py: CUDAGraphTreeManager._run).
RUNS_OF_GRAPHS = 3


def warm(unit: Unit, deadline: float | None = None) -> None:
    """Take a step of one micro batch of each shape that the unit has, the largest first.

    The largest alone is enough where neither the device nor compiled code has a slower first call of each shape. Where
    `Unit.enough_seconds` have passed, only steps whose shapes were run by then are timed, if these tell of the others.
    The learning rate is 0; the optimizer keeps its memory and forgets what it has seen. No step begins after
    `deadline` (of time.perf_counter). The unit remembers what it took, see `Unit.first_calls`.
    """
    with probe.without_learning(unit.bundle):
        _run(unit, deadline)
    steps.zero_optimizer_state(unit.bundle)


def _run(unit: Unit, deadline: float | None) -> None:
    """Run one step of each shape until enough is warm or the time is up."""
    bundle, device = unit.bundle, unit.bundle.device
    runs = RUNS_OF_GRAPHS if bundle.configuration.levers["compile"] in GRAPHS else 1
    begun = device.mark()
    for count, micro_batches in _by_steps(unit):
        for micro in (one for one in micro_batches for _ in range(runs)):
            batches, terms, _ = steps.prepare(bundle, [micro])
            unit.warmed += [tuple(batch["input_ids"].shape) for batch in batches]
            steps.optimizer_step(bundle, batches, terms)
            ended = device.mark()
            device.synchronize()
            unit.warm_seconds = device.between(begun, ended)
            if deadline is not None and time.perf_counter() > deadline:
                return
        enough = unit.enough_seconds is not None and unit.warm_seconds / runs >= unit.enough_seconds
        if enough and count < len(unit.plan) and unit.first_steps_predict_rest(count):
            unit.timed_steps = count
            return


def _by_steps(unit: Unit) -> Iterator[tuple[int, list[MicroBatch]]]:
    """Yields (number of the next steps of the unit, a micro batch of each shape that no earlier step had).

    These are all steps at once, or one after another where the unit may be timed in part.
    """
    if not unit.bundle.device.first_call_per_shape and not unit.bundle.compiled:
        yield len(unit.plan), list(_distinct(unit, unit.plan).values())[:1]
        return
    together = len(unit.plan) if unit.enough_seconds is None else 1
    seen: set[tuple[int, int]] = set()
    for at in range(0, len(unit.plan), together):
        found = _distinct(unit, unit.plan[at : at + together])
        yield at + together, [micro for shape, micro in found.items() if shape not in seen]
        seen |= found.keys()


def _distinct(unit: Unit, plan: list[Step]) -> dict[tuple[int, int], MicroBatch]:
    """A micro batch of each padded shape of these steps, the largest shape first."""
    lengths, recipe = unit.bundle.data.lengths, unit.bundle.recipe
    of_shape: dict[tuple[int, int], MicroBatch] = {}
    for micro in (micro for step in plan for micro in step):
        of_shape.setdefault(shape_of(micro, lengths, recipe), micro)
    return {shape: of_shape[shape] for shape in sorted(of_shape, key=lambda one: (-math.prod(one), one))}

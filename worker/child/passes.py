"""One pass over the work unit: launches its steps, and waits for the device once a window, not once a step.

As in a real run, the next step's batches are prepared while the device computes. A pass begins with the first step's
batches ready and, to cost the same, prepares them again during its last step. Why windows: docs/decisions/0012.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from training.batches import Prepared
from worker.child import steps
from worker.child.windows import Mark, Window

if TYPE_CHECKING:
    from worker.child.timing import Unit


class Pass:
    """Trains a unit's chosen steps once, and gives the unit their timings, losses and gradient norms."""

    def __init__(self, unit: Unit, deadline: float | None) -> None:
        self._unit, self._deadline, self._device = unit, deadline, unit.bundle.device
        self._before: Window | None = None  # the window before this one, unless a pause lies between the two
        self._window = self._opened()
        self._last: Any = None  # the device's mark at the end of the last piece that was launched

    def run(self) -> bool:
        """Train the steps, as `Unit.run` says; TrainingError when a step went wrong."""
        unit = self._unit
        with contextlib.closing(steps.prepared(unit.bundle, itertools.chain(unit.chosen, unit.plan[:1]))) as made:
            upcoming = next(made)
            for number in range(len(unit.chosen)):
                if self._deadline is not None and time.perf_counter() > self._deadline:
                    self._settle()
                    return False
                upcoming = self._step(number, upcoming, made)
                if not self._window_is_over(number) or number + 1 == len(unit.chosen):
                    continue
                if unit.is_hopeless():
                    return True
                if unit.rest_is_predicted():
                    unit.timed_steps = number + 1
                    break
        self._settle()
        unit.passes += 1
        return True

    def _opened(self) -> Window:
        return Window([(0, self._device.neighbours())], time.perf_counter())

    def _window_is_over(self, number: int) -> bool:
        """Whether the window ends with this step, as it is long enough or a turn is over. Then the next one is open."""
        turns, window = self._unit.turns, self._window
        turn_is_over = turns is not None and turns.trained(number, len(self._unit.plan[number]))
        if not (turn_is_over or window.is_long() or len(window.readings) > 1):
            return False
        self._settle()
        self._before = window
        if turns is not None and turn_is_over:
            turns.pause()
            self._before = None
        self._window = self._opened()
        return True

    def _step(self, number: int, step: Prepared, made: Generator[Prepared]) -> Prepared:
        """Launch one step without waiting for it, and return the next step's batches."""
        batches, terms, _ = step
        self._unit.shapes_of[number] = [tuple(batch["input_ids"].shape) for batch in batches]
        pieces = itertools.count()
        self._last = self._device.mark()

        def mark() -> None:
            self._mark((number, next(pieces)), len(batches))

        self._window.results.append(steps.optimizer_step(self._unit.bundle, batches, terms, mark))
        upcoming = next(made)
        self._window.waits.append((number, self._last, self._device.mark()))
        return upcoming

    def _mark(self, piece: tuple[int, int], micro_batches: int) -> None:
        """Mark the end of a piece of a step, which is a micro batch or, after all of them, the update."""
        device, window, turns = self._device, self._window, self._unit.turns
        begun, self._last = self._last, device.mark()
        window.marks.append(Mark(piece, begun, self._last, turns.number if turns else 0))
        number, at = piece
        # Within a step, readings are right and a pause stops the work only where the host does not run ahead.
        if at >= micro_batches or device.runs_ahead:
            return
        if turns is not None and at + 1 < micro_batches and turns.trained(number, at + 1):
            window.read(device.neighbours())
            turns.pause()
            window.read(device.neighbours())
            self._last = device.mark()
        elif window.is_long():
            window.read(device.neighbours())

    def _settle(self) -> None:
        """Wait for the device, then give the unit what the window holds; TrainingError when a step went wrong.

        What is left at the end of a pass may be too short to tell other processes' share. It is then judged together
        with the window before it.
        """
        device, window, unit = self._device, self._window, self._unit
        device.synchronize()
        if not window.marks:
            return
        window.merge_short_end(self._before)
        window.read(device.neighbours())
        unit.clocks += filter(None, (device.clock(reading) for _, reading in window.readings))
        for loss, norm in window.results:
            result = steps.StepResult(float(loss), float(norm))
            unit.losses.append(result.loss)
            # A gradient scaler's skipped step has no norm, and infinity is not JSON.
            unit.grad_norms.append(result.grad_norm if math.isfinite(result.grad_norm) else None)
            steps.check(unit.bundle, result, len(unit.losses) - 1)
        waited = {number: device.between(first, last) for number, first, last in window.waits}
        for number, seconds in waited.items():
            unit.waits.setdefault(number, []).append(seconds)
        for first, last, earlier, later in window.spans():
            share = device.others_share(earlier, later)
            for mark in window.marks[first:last]:
                self._add(mark, share, waited)

    def _add(self, mark: Mark, others_share: float | None, waited: dict[int, float]) -> None:
        """Give the unit a piece's seconds, an update's with the wait for the next step's batches."""
        number, at = mark.piece
        wait = waited[number] if at == len(self._unit.plan[number]) else 0.0
        seconds = self._device.between(mark.begun, mark.ended) + wait
        self._unit.pieces.add(mark.piece, seconds, others_share)
        self._unit.turned.append((mark.turn, mark.piece, seconds))

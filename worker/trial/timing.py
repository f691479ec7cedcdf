"""Times the job's work unit: every batch by device marks, only timings that had the device to themselves.

The unit's time is the sum over its batches of the median of their clean timings; its interval is a bootstrap
over them. Never mean tokens over the median step: with varying lengths that flattered grouping by 72%.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from service.contract.measurement import Timing
from worker.trial import loop, sizes
from worker.trial.arrange import Step
from worker.trial.build import Bundle

MOST_OTHERS = 0.10
WINDOW_SECONDS = 0.3
BOOTSTRAP = 1000


@dataclass
class Pieces:
    """Timings of the unit's pieces: each micro batch, and each update with the wait for the next step's batches.

    `clean` first, all kept.
    """

    clean: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    dirty: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    worst_share: float = 0.0

    def add(self, piece: tuple[int, int], seconds: float, share: float) -> None:
        """Note one timing and the share of the device that others had."""
        self.worst_share = max(self.worst_share, share)
        (self.clean if share <= MOST_OTHERS else self.dirty).setdefault(piece, []).append(seconds)

    def short(self, pieces: int, wanted: int) -> bool:
        """Whether some piece has fewer clean timings than wanted."""
        return len(self.clean) < pieces or any(len(times) < wanted for times in self.clean.values())

    def best(self) -> dict[tuple[int, int], list[float]]:
        """Clean timings; the others only for pieces that have none."""
        return {piece: times for piece, times in self.dirty.items() if piece not in self.clean} | self.clean

    def clean_share(self) -> float:
        """The share of timings that were clean."""
        clean = sum(map(len, self.clean.values()))
        return clean / max(1, clean + sum(map(len, self.dirty.values())))


def interval(
    pieces: dict[tuple[int, int], list[float]], away: list[float] | None = None, seed: int = 0
) -> tuple[float, float, float]:
    """(sum of medians, low, high): 95% of a bootstrap.

    Each piece's timings are few, so the residuals around the medians are pooled over all pieces that have more than
    one, relative to their size, widened by what so few understate (n / (n - 1)), and drawn with replacement. Where
    most pieces have a single timing, `away` stands in: how far the pieces are from what their shapes predict.
    """
    medians = [statistics.median(times) for times in pieces.values()]
    total = sum(medians)
    residuals = [
        (value / median - 1) * (len(times) / (len(times) - 1)) ** 0.5
        for times, median in zip(pieces.values(), medians, strict=True)
        for value in times
        if median and len(times) > 1
    ]
    if len(residuals) <= len(medians):
        residuals = away or residuals or [0.0]
    rng = random.Random(seed)
    counts = [len(times) for times in pieces.values()]
    # One draw stands for the mean of a piece's timings, so its spread shrinks with their number.
    sums = sorted(
        sum(median * (1 + rng.choice(residuals) / count**0.5) for median, count in zip(medians, counts, strict=True))
        for _ in range(BOOTSTRAP)
    )
    return total, min(total, sums[int(0.025 * BOOTSTRAP)]), max(total, sums[int(0.975 * BOOTSTRAP)])


@dataclass
class Unit:
    """The work unit arranged for one micro batch, its timings and losses gathered."""

    bundle: Bundle
    micro: int
    plan: list[Step]
    pieces: Pieces = field(default_factory=Pieces)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    shapes_of: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    waits: dict[int, list[float]] = field(default_factory=dict)
    passes: int = 0
    peak_bytes: int | None = None
    reserved_bytes: int | None = None

    def run(self, deadline: float | None = None) -> bool:
        """One pass over the unit, training all along; False when the deadline (perf_counter) cut it short.

        As in a run, the next step's batches are made while the device computes, and those after the last are the
        first's; a pass begins with the first ones ready.
        """
        with contextlib.closing(loop.loaded(self.bundle, itertools.chain(self.plan, self.plan[:1]))) as steps:
            upcoming = next(steps)
            for number in range(len(self.plan)):
                if deadline is not None and time.perf_counter() > deadline:
                    return False
                upcoming = self._step(number, upcoming, steps)
        self.passes += 1
        return True

    def _step(self, number: int, step: loop.Loaded, steps: Generator[loop.Loaded]) -> loop.Loaded:
        """One step; the next one's batches. What the device waited for them is part of the update's piece."""
        batches, items, _ = step
        self.shapes_of[number] = [tuple(batch["input_ids"].shape) for batch in batches]
        device, began = self.bundle.device, time.perf_counter()
        marks = [device.mark()]
        readings = [(0, device.neighbours())]
        wall = time.perf_counter()

        def mark() -> None:
            nonlocal wall
            marks.append(device.mark())
            if time.perf_counter() - wall >= WINDOW_SECONDS:
                readings.append((len(marks) - 1, device.neighbours()))
                wall = time.perf_counter()

        loss, norm = loop.optimizer_step(self.bundle, batches, items, mark)
        upcoming = next(steps)
        ready = time.perf_counter() - began
        device.synchronize()
        if readings[-1][0] != len(marks) - 1:
            if len(readings) > 1:
                readings.pop()  # the rest is short: it is read together with the window before it
            readings.append((len(marks) - 1, device.neighbours()))
        result = loop.StepResult(float(loss), float(norm))
        self.losses.append(result.loss)
        # A gradient scaler's skipped step has no norm, and infinity is not JSON.
        self.grad_norms.append(result.grad_norm if math.isfinite(result.grad_norm) else None)
        loop.check(self.bundle, result, len(self.losses) - 1)
        waited = max(0.0, ready - device.between(marks[0], marks[-1]))
        self.waits.setdefault(number, []).append(waited)
        for (first, before), (last, after) in zip(readings, readings[1:], strict=False):
            share = device.others_share(before, after)
            for at in range(first, last):
                seconds = device.between(marks[at], marks[at + 1])
                self.pieces.add((number, at), seconds + (waited if at == len(batches) else 0.0), share)
        return upcoming

    def piece_count(self) -> int:
        """Micro batches and updates of the unit."""
        return sum(len(step) + 1 for step in self.plan)

    def timing(self) -> Timing:
        """What was seen so far."""
        seconds, low, high = interval(self.pieces.best(), self._away())
        lengths = self.bundle.data.lengths
        samples = [sample for step in self.plan for micro in step for row in micro for sample in row]
        shapes = [shape for shapes in self.shapes_of.values() for shape in shapes]
        return Timing(
            micro_batch_size=self.micro,
            seconds=seconds,
            low=low,
            high=high,
            samples=len(samples),
            tokens=sum(lengths[sample] for sample in samples),
            padded_tokens=sum(rows * width for rows, width in shapes),
            steps=len(self.plan),
            passes=self.passes,
            waiting_seconds=sum(statistics.median(waits) for waits in self.waits.values()),
            peak_bytes=self.peak_bytes,
            reserved_bytes=self.reserved_bytes,
            clean_share=self.pieces.clean_share(),
            largest_share_of_others=self.pieces.worst_share,
        )

    def _away(self) -> list[float]:
        """Relative distances of the timed micro batches from the cost of their shapes."""
        shapes = self.shapes()
        predicted = sizes.predicted(sizes.cost_model(shapes), shapes)
        return [seconds / expected - 1 for (_, _, seconds), expected in zip(shapes, predicted, strict=True)]

    def shapes(self) -> list[tuple[int, int, float]]:
        """(rows, tokens of the longest, seconds) of every timed micro batch."""
        best = self.pieces.best()
        return [
            (*shape, statistics.median(best[(number, at)]))
            for number, shapes in self.shapes_of.items()
            for at, shape in enumerate(shapes)
            if (number, at) in best
        ]


def time_unit(unit: Unit, passes: int, extra: int = 2, deadline: float | None = None) -> None:
    """`passes` over the unit, and up to `extra` more while some piece is short of clean timings."""
    for _ in range(passes + extra):
        if unit.passes >= passes and not unit.pieces.short(unit.piece_count(), passes):
            return
        if not unit.run(deadline):
            return

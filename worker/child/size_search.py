"""The search for the largest size that fits in memory, by lines through what the sizes before it needed.

It knows steps only by what they tell: their peaks and how often they had the allocator free its cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from service.contract.child import ChildMessage, ProbeDone, ProbeStarted
from service.contract.measurement import MemoryLine, Probe
from service.contract.states import ProbePhase
from worker.child.build import Bundle
from worker.devices import Device

# Shares of the capacity that are left free: before a predicted size has been run, and after it (docs/decisions/0007).
MARGIN, LEAST_MARGIN = 0.007, 0.005
BENT = 1.5  # the next prediction assumes this many times the last one's error a sample (docs/decisions/0007)
WORTH_ANOTHER = 1.015  # a predicted size is run only if it is larger than the largest that ran by this factor
ROOM_FOR_TWO = 1.6  # samples of free memory, by the line, below which a second larger size is not expected to fit
MOST_SIZES = 5  # that are run in one search, those of earlier children included
MOST_GROWTH = 64  # times the first size, for the second: the slope of one size alone may be the allocator's rounding
STEP_BACK = 0.9  # of the predicted size, after it has run out of memory once
# The slope through small sizes may be half of that of large ones, for which memory peaks elsewhere in the step. So an
# untested line is followed to 1/FAR of its prediction only, unless that is within SPAN times the largest size that ran.
FAR, SPAN = 1.75, 3
MOST_GUESSED = 8  # times the largest that ran, by an untested line: the slope of two close sizes is mostly noise
ENOUGH_TOKENS = 1024  # padded tokens of a step that only checks a line that earlier trials have measured
SETTLED_AFTER = 3  # more steps of a size, after one that freed the allocator's cache: the last must not free it again
# Share of the capacity that stays free at the first size beyond the peaks' line, which is expected to fit only if the
# allocator frees its cache: what it cannot free is rounded up to segments (docs/decisions/0007).
FREEING_MARGIN = 0.02
THRASHES = "allocator retries"  # the limit of a search in which a size was too large: each step freed the cache
Tell = Callable[[ChildMessage], None]  # sends a message to the worker, which outlives a child that memory kills


@dataclass(frozen=True)
class StepPeaks:
    """What a step needed, in bytes: the most that was held in forward and backward, and in the update.

    `unfreeable` is the part of the first that a caching allocator could not have given back by freeing its cache.
    """

    step: int
    update: int = 0
    unfreeable: int | None = None

    @property
    def most(self) -> int:
        """The most bytes of the whole step."""
        return max(self.step, self.update)


FullStep = Callable[[Bundle, int, bool], StepPeaks]


@dataclass(frozen=True)
class EarlierProbes:
    """What is known before a child begins: the probes of the trial's earlier children, and earlier trials' line."""

    probes: tuple[Probe, ...] = ()
    line: MemoryLine | None = None


@dataclass
class Found:
    """The result of a search. The size `largest` was run; `predicted` is the largest by the line, within the bounds.

    Where an allocator freed its cache the line no longer says what fits, and both are the largest that was run.
    """

    largest: int
    predicted: int
    limited_by: str
    line: MemoryLine | None = None
    probes: list[Probe] = field(default_factory=list)


class Search:
    """One search for the largest size that fits in a phase (training, compiled, evaluation), up to a limit.

    With `beyond` it also looks for larger sizes than the peaks say, which fit because the allocator frees its cache.
    """

    def __init__(
        self,
        bundle: Bundle,
        phase: ProbePhase,
        step: FullStep,
        limit: tuple[int, str],
        tell: Tell,
        known: EarlierProbes,
        beyond: bool = False,
    ):
        self._device: Device = bundle.device
        self._bundle, self._phase, self._step, self._tell = bundle, phase, step, tell
        self._beyond = beyond
        self._hint = known.line if phase == ProbePhase.training else None
        # Predictions from a single size are trusted where earlier trials have measured a line, and outside training.
        self._trusted = self._hint is not None or phase != ProbePhase.training
        mine = [probe for probe in known.probes if probe.phase == phase]
        self.fitted = {probe.micro_batch_size: probe for probe in mine if probe.fits}
        failed = [probe for probe in mine if not probe.fits]
        self._has_freed = any(probe.retries for probe in mine)
        self._limit, self._limited_by = limit
        self._rest: float | None = None  # bytes in use between steps
        self._residual: float | None = None  # as in a MemoryLine
        self._bend: float | None = None  # error of the last prediction: bytes for each sample beyond what had run
        self.line: MemoryLine | None = None
        self.probes: list[Probe] = []
        self._failed = len(failed)
        if failed:
            least = min(failed, key=lambda probe: probe.micro_batch_size)
            self._lower(least.micro_batch_size, THRASHES if least.thrashes else "memory")
        self._sizes = len(mine)
        self._fit()

    def _lower(self, failed: int, reason: str) -> None:
        """The size `failed` was too large: limit the search to 2% below it, or to one sample below where 2% is less."""
        self._limit, self._limited_by = min(self._limit, failed - max(1, math.floor(0.02 * failed))), reason
        self.fitted = {size: probe for size, probe in self.fitted.items() if size < failed}

    def run(self, size: int) -> None:
        """Run a step of `size` and record its peaks.

        The first call runs a single sample before, which allocates the optimizer's state and the kernels' workspaces.
        """
        self._tell(ProbeStarted(micro_batch_size=size, phase=self._phase))
        # Not in the compiled phase, which follows eager steps, and in which a single sample would be compiled apart.
        if self._rest is None and self._phase != ProbePhase.compiled:
            self._step(self._bundle, 1, True)
        retries = [self._device.retries()]
        started = time.perf_counter()
        peaks = self._step(self._bundle, size, True)
        seconds = time.perf_counter() - started
        retries.append(self._device.retries())
        while retries[-1] > retries[-2] and len(retries) < 2 + SETTLED_AFTER:
            self._step(self._bundle, size, False)
            retries.append(self._device.retries())
        self._device.empty_cache()  # which is no part of the memory at rest
        self._rest = float(self._device.used())
        probe = Probe(
            micro_batch_size=size,
            peak_bytes=peaks.step,
            update_bytes=peaks.update,
            unfreeable_bytes=peaks.unfreeable,
            reserved_bytes=self._device.reserved(),
            retries=retries[-1] - retries[0],
            thrashes=retries[-1] > retries[-2],
            seconds=seconds,
            phase=self._phase,
        )
        self._tell(ProbeDone(probe=probe))
        self.probes.append(probe)
        self._sizes += 1
        self._has_freed = self._has_freed or probe.retries > 0
        if probe.thrashes:
            # Each step had the allocator free its cache and retry (the signal that MosaicML Composer uses): the size
            # fits now, but would run out of memory in a longer run.
            if size == 1 and self._phase != ProbePhase.evaluation:  # which takes one sample in any case
                raise torch.OutOfMemoryError("one sample makes the allocator free its cache in every step")
            self._failed += 1
            self._lower(size, THRASHES)
            return
        if len(retries) > 2:
            # Only the first steps had to free the cache. The segments that they left suit the size, so it fits.
            self.fitted[size] = probe
            return
        if len(self.fitted) > 1 and self.line is not None:
            away = abs(peaks.step - (self.line.rest_bytes + self.line.slope_bytes * size))
            self._residual = max(self._residual or 0.0, away / self._device.capacity())
            self._bend = away / max(1, abs(size - max(self.fitted)))
        self.fitted[size] = probe
        self._fit()

    def _fit(self) -> None:
        """Fit the line through the two largest sizes, or through one size and the memory at rest between steps.

        Sizes for which the allocator freed its cache are left out: their peaks lack what was freed on the way.
        """
        points = [(size, float(probe.peak_bytes or 0)) for size, probe in self._whole()][-2:]
        if not points or (len(points) == 1 and self._rest is None):
            return  # one size gives no slope without the memory at rest, which is unknown of another child
        (first, low), (last, high) = ((0, float(self._rest or 0)), points[0]) if len(points) == 1 else points
        slope = max(1.0, (high - low) / (last - first))
        update = max(float(probe.update_bytes or 0) for probe in self.fitted.values())
        self.line = MemoryLine(
            rest_bytes=high - slope * last, slope_bytes=slope, update_bytes=update, residual=self._residual
        )

    def _whole(self) -> list[tuple[int, Probe]]:
        """The sizes that fitted without having the cache freed, in their order."""
        return [(size, probe) for size, probe in sorted(self.fitted.items()) if not probe.retries]

    def predict(self, line: MemoryLine | None = None) -> int:
        """The largest size by the line, within the limit; the margin depends on how wrong the last prediction was."""
        line = line or self.line
        assert line is not None
        if self._bend is None:
            return min(self._limit, line.largest(self._device.capacity() * (1 - MARGIN)))
        # The last prediction was off by `_bend` bytes for each sample beyond the largest size before: so may this be.
        largest, bend = max(self.fitted), BENT * self._bend
        steeper = line.model_copy(
            update={"slope_bytes": line.slope_bytes + bend, "rest_bytes": line.rest_bytes - bend * largest}
        )
        return min(self._limit, steeper.largest(self._device.capacity() * (1 - LEAST_MARGIN)))

    def _room(self, size: int) -> float:
        """How many samples more than `size` fit by the line."""
        assert self.line is not None
        return (self._device.capacity() - self.line.rest_bytes) / self.line.slope_bytes - size

    def _first(self, confirm: bool) -> int:
        """The first size to run: half of what earlier trials' line predicts, or of the size that failed, or else 1.

        On a CPU, where only small sizes are timed, it is a few rows if the largest need not be confirmed.
        """
        if self._sizes:
            return max(1, self._limit // 2)
        if self._hint is None:
            return 1
        half = max(1, self.predict(self._hint) // 2)
        if confirm or self._device.gains_from_large_batches:
            return half
        bundle = self._bundle
        row = bundle.spec.dataset.max_length if bundle.recipe.rows_are_packed else bundle.data.facts.longest
        return min(half, max(1, ENOUGH_TOKENS // row))

    def _next(self, confirm: bool) -> int | None:
        """The next size, or None when the last one is close enough."""
        if not self.fitted:
            return self._first(confirm)
        largest = max(self.fitted)
        if largest >= self._limit:
            return None
        by_peaks = None if self.fitted[largest].retries else self._by_peaks(largest, confirm)
        by_freeing = self._by_freeing(largest) if self._beyond and confirm else None
        is_tested = self._bend is not None or by_peaks is None  # whether a size has run that a line had predicted
        return by_freeing if by_freeing and is_tested and by_freeing > (by_peaks or 0) else by_peaks

    def _by_peaks(self, largest: int, confirm: bool) -> int | None:
        """The next size by the line through the peaks, or None when the last one is close enough to it."""
        if self.line is None:  # an earlier child ran one size, which gives no slope
            return max(largest + 1, self._limit // 2) if self._failed else largest
        predicted = self.predict()
        if len(self.fitted) == 1 and not self._trusted and predicted > largest:
            return min(predicted, max(largest + 1, min(int(predicted / FAR), MOST_GROWTH * largest)))
        if not confirm or predicted <= largest * WORTH_ANOTHER:
            return None
        if self._bend is None and not self._trusted and predicted > SPAN * largest:
            return min(int(predicted / FAR), MOST_GUESSED * largest)
        if self._bend is not None and self._room(largest) < ROOM_FOR_TWO:
            return None  # at most one more sample fits, by a line whose prediction has been run
        if self._failed and not (self.probes and self.probes[-1].fits):
            # A predicted size did not fit, so the line's error is unknown: first a smaller size, then up again.
            return max(largest + 1, int(predicted * STEP_BACK) if self._failed == 1 else (largest + predicted) // 2)
        return predicted

    def _by_freeing(self, largest: int) -> int | None:
        """The next size that should fit because the allocator frees its cache when memory runs out, or None.

        What freeing cannot give back grows along a line of its own, which may be well below that of the peaks. Where
        the largest size that ran had the cache freed, its own need is known better: at most its peak, from which the
        line's slope goes on. A failure before anything was freed says that the line promises too much.
        """
        known = [(size, one.unfreeable_bytes) for size, one in sorted(self.fitted.items()) if one.unfreeable_bytes]
        whole = [point for point in known if not self.fitted[point[0]].retries]
        points = (whole if len(whole) > 1 else known)[-2:]
        if len(points) < 2:
            return None
        (first, low), (last, high) = points
        slope, capacity, freed = max(1.0, (high - low) / (last - first)), self._device.capacity(), self.fitted[largest]
        if freed.retries:
            need = min(freed.peak_bytes or 0, (freed.unfreeable_bytes or 0) + FREEING_MARGIN * capacity)
            size = largest + math.floor((capacity * (1 - LEAST_MARGIN) - need) / slope)
        elif self._failed:
            return None
        else:
            slope += BENT * (self._bend or 0.0)
            size = last + math.floor((capacity * (1 - FREEING_MARGIN) - high) / slope)
        if self._failed:
            size = (largest + min(size, self._limit)) // 2
        return min(size, self._limit) if size > largest * WORTH_ANOTHER else None

    def search(self, confirm: bool = True, first: int | None = None) -> Found:
        """Run up to MOST_SIZES sizes, starting at `first`; without `confirm` the predicted size itself is not run."""
        if first and not self.fitted and self._sizes == 0:
            self.run(min(first, self._limit))
        while self._limit >= 1 and self._sizes < MOST_SIZES:
            size = self._next(confirm)
            if size is None:
                break
            self.run(size)
        largest = max(self.fitted, default=0)
        predicted = max(largest, self.predict() if self.line and self.fitted and not self._has_freed else 0)
        is_limited = predicted >= self._limit or self._limited_by == THRASHES
        return Found(largest, predicted, self._limited_by if is_limited else "memory", self.line, self.probes)

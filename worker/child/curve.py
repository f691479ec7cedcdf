"""The throughput curve: the work unit timed at a few micro batch sizes that fit, and which of them is recommended.

The largest that fits is a limit, not the goal: recommended is the fastest, or the smallest size within 1% of it. With
the objective memory it is the smallest at which the run is not slower than with the baseline.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from service.contract.child import ProbeStarted, Progress
from service.contract.measurement import PROCESS_SPREAD, Timing
from service.contract.objective import SMALLEST_WITHIN, minimises_memory, training_seconds_of
from service.contract.states import Origin
from service.contract.task import TrialRequest
from service.levers.batching import BUDGETED, PACKED
from worker.child import probe, sizes, typical
from worker.child.arrange import candidates, plan_of, widest_first
from worker.child.build import Bundle
from worker.child.size_search import Found, Tell
from worker.child.timing import ENOUGH_SECONDS, Unit, time_unit, unit_timed_enough
from worker.child.warmup import warm

CLEARLY_SLOWER = 1.25  # times the seconds of the search's best trial: such a trial is not timed a second time
# A trial predicted to take more than this many times the best trial's seconds ends in its first pass
# (docs/decisions/0031).
GIVEN_UP = 1.4
# Another size is timed if its predicted seconds are at most this share of the best size's. A full search asks for 2%
# (docs/decisions/0004); a quick search asks for more, since the pass that times the size must pay for itself.
WORTH_TRYING, WORTH_TRYING_QUICKLY = 0.98, 0.8
NEAR = 2  # a size is predicted only within this factor of a timed one, because the cost model extrapolates badly
MORE_GUIDED = 2  # sizes that the cost model may add to those that are timed in any case
MOST_HALVED = 4  # sizes timed in all where the smallest that is fast enough is looked for
# Times the baseline's seconds: a size has to be so much faster in its trial that the verification does not find it
# slower, as pairs of processes differ by about that much (service.contract.measurement.PROCESS_SPREAD).
FAST_ENOUGH = 1 - PROCESS_SPREAD
TOKENS_A_CORE, MOST_TOKENS = 512, 2048  # of the first micro batch on a CPU
SAFE_SHARE = 0.6  # of the largest size by the trial's own memory line: up to it, the worst case need not run first
BELOW_LARGEST = (1.0, 0.75, 0.5)  # shares of the largest size that are timed where the whole curve is asked for


def first_size(bundle: Bundle, fitting: list[int], told: int | None = None) -> int:
    """The size to time first: on a GPU the largest that fits.

    On a CPU it is what the search `told`, or else a size that keeps the cores busy: a larger batch would only compute
    more padding.
    """
    if bundle.device.gains_from_large_batches:
        return fitting[-1]
    if told in fitting:
        return told
    facts = bundle.data.facts
    typical = bundle.spec.dataset.max_length if bundle.recipe.rows_are_packed else facts.tokens / facts.rows
    if bundle.configuration.levers["batching"] in BUDGETED:
        typical = facts.longest
    enough = min(MOST_TOKENS, TOKENS_A_CORE * torch.get_num_threads())
    small = [size for size in fitting if size * typical <= enough]
    return small[-1] if small else fitting[0]


class Curve:
    """The timings of one trial, by micro batch size."""

    def __init__(
        self,
        bundle: Bundle,
        samples: list[int],
        request: TrialRequest,
        tell: Tell,
        started: float,
        once_seconds: float = 0.0,
    ):
        self._bundle, self._samples, self._request, self._tell = bundle, samples, request, tell
        self._once = once_seconds  # of the run, for loading, compiling and evaluating
        # The baseline is what a user would run, so that its micro batch is the fastest in any case.
        self._minimises_memory = minimises_memory(bundle.spec) and request.origin is not Origin.baseline
        # A fifth of the trial's time is kept for what follows the timing, or the worker would end the child.
        self._deadline = started + request.seconds_limit * 0.8
        self._timed: dict[int, Unit] = {}
        self._shapes: list[sizes.Shape] = []
        self._candidates: list[int] = []
        self._found = Found(0, 0, "")
        self._rest = 0.0
        self.warm_seconds = 0.0  # in which sizes ran before they were timed: their worst case, and what they warm up
        self.notes: list[str] = []
        self.losses: tuple[float, ...] = ()
        self.grad_norms: tuple[float | None, ...] = ()

    def run(self, found: Found) -> Unit:
        """Time a few sizes up to the predicted largest, and the recommended one again; return that one's unit.

        After the first size, the cost model chooses only sizes for which the peaks seen while timing leave room.
        TimeoutError when not even one pass over the work unit ended in time.
        """
        self._candidates, self._found = candidates(self._bundle, found.predicted), found
        self._bundle.device.empty_cache()
        self._rest = float(self._bundle.device.used())
        fixed = self._bundle.configuration.micro_batch_size
        if fixed is not None:
            self._time(self._fixed(fixed))
        elif self._minimises_memory:
            self._time_smallest()
        else:
            going = self._time(first_size(self._bundle, self._candidates, self._request.first_micro_batch))
            for below in self._below_largest(found.predicted) if self._request.curve else ():
                going = going and (below in self._timed or self._time(below))
            for _ in range(MORE_GUIDED if going else 0):
                size = self._promising()
                if size is None or not self._time(size):
                    break
        first = next(iter(self._timed.values()))
        self.losses, self.grad_norms = tuple(first.losses), tuple(first.grad_norms)
        best = self._recommended()
        if best.passes and best.timed_share < 1:
            self.notes.append(f"{best.timed_share:.0%} of the work unit was timed, which tells what the rest takes.")
        limit = self._request.best_seconds
        if limit is not None and best.timing().seconds > CLEARLY_SLOWER * limit:
            than = "the baseline" if self._minimises_memory else "the best so far"
            until = "once only" if best.passes else f"until {best.timed_share:.0%} of the work unit told that"
            self.notes.append(f"Clearly slower than {than}, so it was timed {until}.")
        elif best.passes < self._request.passes or not unit_timed_enough(best):
            self._tell(Progress(text=f"timing micro batch {best.micro} again"))
            time_unit(best, passes=self._request.passes, extra=1, deadline=self._deadline)
        return best

    def timings(self) -> tuple[Timing, ...]:
        """The timing of each timed size, the smallest micro batch first."""
        return tuple(self._timed[size].timing() for size in sorted(self._timed))

    def _fixed(self, wanted: int) -> int:
        fitting = [size for size in self._candidates if size <= wanted]
        if fitting[-1] != wanted:
            most = self._bundle.spec.search.max_micro_batch_size
            is_capped = most is not None and wanted > most
            why = "is above search.max_micro_batch_size" if is_capped else "does not fit or divide the effective batch"
            self.notes.append(f"A micro batch of {wanted} {why}; {fitting[-1]} is used.")
        return fitting[-1]

    def _below_largest(self, largest: int) -> list[int]:
        """The candidate sizes at or just below the largest, three quarters of it, and half of it."""
        wanted = [max(1, int(share * largest)) for share in BELOW_LARGEST]
        below = [max((size for size in self._candidates if size <= most), default=None) for most in wanted]
        return list(dict.fromkeys(size for size in below if size is not None))

    def _time(self, size: int) -> bool:
        """Time one pass over the work unit at a size; False when the time is up before the pass ends."""
        bundle, device = self._bundle, self._bundle.device
        device.empty_cache()  # of what larger sizes left there, as it would count as this one's
        device.reset_peak()
        began = time.perf_counter()
        self._tell(ProbeStarted(micro_batch_size=size))
        self._tell(Progress(text=f"timing micro batch {size}"))  # after it, as the last one told is shown
        worst = self._worst(size)
        if worst is None:
            probe.fits(bundle, size)
        unit = Unit(bundle, size, plan_of(bundle, self._samples, size))
        if device.runs_ahead:
            unit.plan = widest_first(unit.plan, bundle.data.lengths, bundle.recipe)
            unit.enough_seconds = ENOUGH_SECONDS
        if self._request.best_seconds is not None:
            unit.most_seconds = GIVEN_UP * self._request.best_seconds
        warm(unit, self._deadline)
        self.warm_seconds += time.perf_counter() - began
        if not unit.run(self._deadline):
            if not self._timed:
                raise TimeoutError(
                    f"one pass over {len(self._samples)} samples did not end in time; allow more minutes, a smaller "
                    "effective batch, or search.verify: quick, which measures on fewer samples"
                )
            return False
        unit.peak_bytes, unit.reserved_bytes = max(device.peak(), worst or 0), device.reserved()
        self._timed[size] = unit
        self._shapes += unit.shapes()
        return True

    def _time_smallest(self) -> None:
        """Time sizes until the smallest is known that is fast enough, halving what is left of the candidates.

        A device that gains from large batches begins in the middle, another with the smallest size, which may well do.
        """
        low, high = 0, len(self._candidates)  # the place of the smallest that is fast enough is within [low, high]
        at = high // 2 if self._bundle.device.gains_from_large_batches else 0
        for _ in range(MOST_HALVED):
            size = self._candidates[at]
            if not self._time(size):
                return
            low, high = (low, at) if self._is_fast_enough(self._timed[size]) else (at + 1, high)
            if low >= high:
                return
            at = (low + high) // 2

    def _is_fast_enough(self, unit: Unit) -> bool:
        """Whether the run takes no longer than with the baseline; any size is fast enough where no baseline ran."""
        limit = self._request.slowest_run_seconds
        if limit is None:
            return True
        once = self._once + unit.first_calls()
        tokens = self._bundle.data.facts.tokens
        return once + training_seconds_of(self._bundle.spec, tokens, unit.timing()) <= limit * FAST_ENOUGH

    def _worst(self, size: int) -> int | None:
        """The peak bytes of the size's worst-case batch if that need not run before the size is timed, else None.

        It need not where the probe has run this size, or, in a quick search on a CPU, where the memory line puts the
        size far below the capacity. A GPU runs it anyway, because each new shape's first call selects kernels.
        """
        found, bundle = self._found, self._bundle
        ran = {one.micro_batch_size: one.peak_bytes for one in found.probes}
        if bundle.compiled:
            return None
        if size in ran:
            return ran[size]
        quick = not bundle.device.first_call_per_shape and not self._request.curve
        return int(found.line.at(size)) if quick and found.line and size <= SAFE_SHARE * found.predicted else None

    def _recommended(self) -> Unit:
        """The unit of the fastest size, or of the smallest size within 1% of it; or of the smallest fast enough."""
        enough = [size for size, unit in self._timed.items() if self._minimises_memory and self._is_fast_enough(unit)]
        if enough:
            return self._timed[min(enough)]
        seconds = {size: unit.timing().seconds for size, unit in self._timed.items()}
        near = [size for size in seconds if seconds[size] <= min(seconds.values()) * (1 + SMALLEST_WITHIN)]
        return self._timed[min(near)]

    def _promising(self) -> int | None:
        """The untimed size that the cost model predicts to be enough faster than the best timed one, or None."""
        model = sizes.cost_model(self._shapes)
        best = min(self._timed, key=lambda one: self._timed[one].timing().seconds)
        update = min(unit.updates_seconds() / len(unit.plan) for unit in self._timed.values())
        promised: dict[int, float] = {
            size: self._promise(size, model, update)
            for size in self._candidates
            if size == best or (size not in self._timed and self._near(size) and self._has_room(size))
        }
        size = min(promised, key=lambda one: promised[one])
        worth = WORTH_TRYING if self._request.curve else WORTH_TRYING_QUICKLY
        return size if promised[size] < promised[best] * worth else None

    def _promise(self, size: int, model: np.ndarray, update: float) -> float:
        """The unit's seconds at a micro batch size by the cost model, corrected to the batches of a run."""
        plan, lengths = plan_of(self._bundle, self._samples, size), self._bundle.data.lengths
        unit, run = typical.Shapes(plan, lengths, self._bundle), typical.of_run(self._bundle, size)
        seconds = sizes.predict(model, plan, lengths) + update * len(plan)
        return seconds * typical.token_factor(unit, run, self._shapes, update)

    def _near(self, size: int) -> bool:
        return any(timed <= NEAR * size and size <= NEAR * timed for timed in self._timed)

    def _has_room(self, size: int) -> bool:
        """Whether a size fits while it is timed, by a line through the peaks of the sizes that were timed.

        The probe's line is too low here, since the allocator keeps blocks of earlier batches while a unit is timed.
        """
        peaks = {timed: float(unit.peak_bytes or 0) for timed, unit in self._timed.items()}
        most = max(peaks)
        if size <= most:
            return True
        below = max((timed for timed in peaks if timed < most), default=0)
        slope = max(0.0, peaks[most] - peaks.get(below, self._rest)) / (most - below)
        return peaks[most] + slope * (size - most) <= self._bundle.device.capacity()


def warm_compiled(bundle: Bundle, largest: int, told: int | None, tell: Tell) -> float:
    """Run the size that is timed first (`first_size`) and the smallest, so that both are compiled.

    Returns how many seconds longer the first run of the former took than a second one. Those of the smallest are added
    for batchings whose steps end with what is left of rows or tokens; others have a single row only at an epoch's end.
    """
    fitting = candidates(bundle, largest)
    size = first_size(bundle, fitting, told)
    found = _first_call(bundle, size, tell)
    of_one = _first_call(bundle, fitting[0], tell) if fitting[0] != size else 0.0
    return found + of_one * (bundle.configuration.levers["batching"] in (*PACKED, *BUDGETED))


def _first_call(bundle: Bundle, size: int, tell: Tell) -> float:
    """How many seconds longer a step's first run takes than a second one."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        probe.fits(bundle, size, tell)
        seconds.append(time.perf_counter() - started)
    return max(0.0, seconds[0] - seconds[1])

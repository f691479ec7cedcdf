"""Finds the largest batch that fits: two small full steps give a line, then predict, confirm, correct.

A full step is forward, backward, clipping and an optimizer step whose state is allocated, at the worst case the
batching can make, gradients of an earlier micro batch in place where the step accumulates. The learning rate is 0
meanwhile, so the weights stay as they are. Forward and backward grow with the batch, the update does not: the two
peaks are read apart, or a small batch's update would hide the line. An out-of-memory error is reported and ends the
child; the next child goes on from what is known.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from service.contract.child import ChildMessage, ProbeDone, ProbeStarted
from service.contract.measurement import MemoryLine, Probe
from service.contract.states import ProbePhase
from service.exports.templates.levers.evaluation import LONGEST_GENERATED, generated_ids
from service.exports.templates.segments import moved
from worker.child import arrange, loop
from worker.child.build import Bundle, evaluating
from worker.child.worst import evaluation_batch, worst_case
from worker.devices import Device

# Shares of the capacity that are left free: before the line was put to the test, and after it.
MARGIN, LEAST_MARGIN = 0.007, 0.005
BENT = 1.5  # times the error that the last prediction had, by how much further the next one goes
WORTH_ANOTHER = 1.015
ROOM_FOR_TWO = 1.6  # samples: a fresh process takes a little less than one that has probed
MOST_SIZES = 5
MOST_GROWTH = 64  # from the first size: the slope of one size alone may be an allocator's rounding
STEP_BACK = 0.9
# Small sizes may show half the slope that large ones have (another place in the step is then the peak), so a line that
# was not put to the test is followed to this share only, unless its sizes span a good part of the way.
FAR, SPAN = 1.75, 3
MOST_GUESSED = 8  # times the largest that ran, where two close sizes are all there is: their slope is mostly noise
MOST_EVALUATED = 256
ENOUGH_TOKENS = 1024  # padded, of a step that only checks a line that earlier trials have drawn
Step = Callable[[Bundle, int], tuple[int, int]]


@dataclass(frozen=True)
class Known:
    """What is known before a child begins: the probes of earlier children, and the line of earlier trials."""

    probes: tuple[Probe, ...] = ()
    line: MemoryLine | None = None


@dataclass
class Tell:
    """Says what is about to be tried, so that the worker knows it when the child dies of it."""

    send: Callable[[ChildMessage], None]

    def begun(self, micro: int, phase: ProbePhase = ProbePhase.training) -> None:
        """A step of this size begins."""
        self.send(ProbeStarted(micro_batch_size=micro, phase=phase))

    def done(self, probe: Probe) -> None:
        """It fitted."""
        self.send(ProbeDone(probe=probe))


@dataclass
class Found:
    """What the probe learnt. `largest` was run; `predicted` is what the line says, within the bounds."""

    largest: int
    predicted: int
    limited_by: str
    line: MemoryLine | None = None
    probes: list[Probe] = field(default_factory=list)


@contextlib.contextmanager
def without_learning(bundle: Bundle) -> Iterator[None]:
    """Steps in here leave the weights as they are: the learning rate is 0."""
    rates = [float(group["lr"]) for group in bundle.optimizer.param_groups]
    _set_rates(bundle, [0.0] * len(rates))
    try:
        yield
    finally:
        _set_rates(bundle, rates)


def _set_rates(bundle: Bundle, rates: list[float]) -> None:
    """The learning rate of each group; torchao keeps tensors, and refuses numbers in their place."""
    for group, rate in zip(bundle.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def bound(bundle: Bundle) -> tuple[int, str]:
    """The largest micro batch that makes sense, and what says so."""
    effective, data = bundle.configuration.effective_batch_size, bundle.data
    bounds = [(effective, "effective batch"), (data.facts.rows, "dataset size")]
    if bundle.rows_are_packed():
        longest = sorted(range(len(data.lengths)), key=lambda one: -data.lengths[one])[:effective]
        rows = len(arrange.pack(longest, data.lengths, bundle.spec.dataset.max_length))
        bounds[0] = (rows, "effective batch")
    if bundle.spec.search.max_micro_batch_size:
        bounds.append((bundle.spec.search.max_micro_batch_size, "search.max_micro_batch_size"))
    return min(bounds, key=lambda one: one[0])


def full_step(bundle: Bundle, micro: int) -> tuple[int, int]:
    """One step at the worst case; (peak bytes of forward and backward, peak bytes of the update)."""
    device = bundle.device
    if micro < bound(bundle)[0] and not hasattr(bundle.optimizer, "held"):
        for parameter in bundle.model.parameters():
            if parameter.requires_grad:  # as an earlier micro batch of the step leaves it
                parameter.grad = torch.zeros_like(parameter)
    batch, items = worst_case(bundle, micro)
    device.reset_peak()
    loop.forward_backward(bundle, batch, torch.tensor(items, device=device.torch))
    device.synchronize()
    step = device.peak()
    del batch
    device.reset_peak()
    loop.update(bundle)
    device.synchronize()
    return step, device.peak()


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluation_step(bundle: Bundle, size: int) -> tuple[int, int]:
    """One evaluation batch at the worst case, with the KV cache where it generates; (peak bytes, 0)."""
    bundle.device.reset_peak()
    batch = moved(evaluation_batch(bundle, size), bundle.device.torch)
    with evaluating(bundle) as score, bundle.autocast():
        float(bundle.model(**batch).loss)
        if score:
            longest = min(LONGEST_GENERATED, batch["input_ids"].shape[1] // 2)
            generated_ids(bundle.model, batch["input_ids"][:, :-longest].tolist(), longest, bundle.pad, longest)
    bundle.device.synchronize()
    return bundle.device.peak(), 0


class Search:
    """One search for a largest size: in a phase, up to a limit, with what is known already."""

    def __init__(self, bundle: Bundle, phase: ProbePhase, step: Step, limit: tuple[int, str], tell: Tell, known: Known):
        self._device: Device = bundle.device
        self._bundle, self._phase, self._step, self._tell = bundle, phase, step, tell
        self._hint = known.line if phase == "training" else None
        # One size is then enough to predict from: it was not 1, or it was not far from the whole.
        self._trusted = self._hint is not None or phase != "training"
        mine = [probe for probe in known.probes if probe.phase == phase]
        self.fitted = {probe.micro_batch_size: probe for probe in mine if probe.peak_bytes is not None}
        failed = [probe.micro_batch_size for probe in mine if probe.peak_bytes is None]
        self._limit, self._limited_by = limit
        self._rest: float | None = None
        self._residual: float | None = None
        self._bend: float | None = None
        self.line: MemoryLine | None = None
        self.probes: list[Probe] = []
        self._failed = len(failed)
        if failed:
            self._lower(min(failed), "memory")
        self._sizes = len(mine)
        self._fit()

    def _lower(self, failed: int, reason: str) -> None:
        """`failed` was too much: stay a little below it, or one below where that is less than 2%."""
        self._limit, self._limited_by = min(self._limit, failed - max(1, math.floor(0.02 * failed))), reason
        self.fitted = {size: probe for size, probe in self.fitted.items() if size < failed}

    def run(self, size: int) -> None:
        """A step of `size`, after one of a single sample that makes the optimizer's state and what kernels keep."""
        self._tell.begun(size, self._phase)
        if self._rest is None and self._phase != "compiled":  # that one follows steps, and 1 would compile apart
            self._step(self._bundle, 1)
        retries = [self._device.retries()]
        started = time.perf_counter()
        peak, update = self._step(self._bundle, size)
        seconds = time.perf_counter() - started
        retries.append(self._device.retries())
        if retries[-1] > retries[-2]:
            self._step(self._bundle, size)
            retries.append(self._device.retries())
        self._device.reset_peak()  # what an allocator keeps for later is not at rest
        self._rest = float(self._device.used())
        probe = Probe(
            micro_batch_size=size,
            peak_bytes=peak,
            update_bytes=update,
            reserved_bytes=self._device.reserved(),
            retries=retries[-1] - retries[0],
            seconds=seconds,
            phase=self._phase,
        )
        self._tell.done(probe)
        self.probes.append(probe)
        self._sizes += 1
        if len(retries) > 2 and retries[-1] > retries[-2] > retries[-3]:
            # The allocator lives from hand to mouth (Composer's signal): it fits, but not for long.
            self._lower(size, "allocator retries")
            return
        if len(self.fitted) > 1 and self.line is not None:
            away = abs(peak - (self.line.rest_bytes + self.line.slope_bytes * size))
            self._residual = max(self._residual or 0.0, away / self._device.capacity())
            self._bend = away / max(1, abs(size - max(self.fitted)))
        self.fitted[size] = probe
        self._fit()

    def _fit(self) -> None:
        """The line through the two largest sizes; through what rests between steps where there is one only."""
        points = sorted((size, float(probe.peak_bytes or 0)) for size, probe in self.fitted.items())[-2:]
        if not points or (len(points) == 1 and self._rest is None):
            return  # one size that another child ran says nothing of the slope
        (first, low), (last, high) = ((0, float(self._rest or 0)), points[0]) if len(points) == 1 else points
        slope = max(1.0, (high - low) / (last - first))
        update = max(float(probe.update_bytes or 0) for probe in self.fitted.values())
        self.line = MemoryLine(
            rest_bytes=high - slope * last, slope_bytes=slope, update_bytes=update, residual=self._residual
        )

    def predict(self, line: MemoryLine | None = None) -> int:
        """The largest size by the line, within the limit; what is kept back follows from how well it held."""
        line = line or self.line
        assert line is not None
        if self._bend is None:
            return min(self._limit, line.largest(self._device.capacity() * (1 - MARGIN)))
        # The line was off by `bend` bytes a sample beyond what had been run, so it may be again.
        largest, bend = max(self.fitted), BENT * self._bend
        steeper = line.model_copy(
            update={"slope_bytes": line.slope_bytes + bend, "rest_bytes": line.rest_bytes - bend * largest}
        )
        return min(self._limit, steeper.largest(self._device.capacity() * (1 - LEAST_MARGIN)))

    def _room(self, size: int) -> float:
        """How many samples more than `size` the line has room for."""
        assert self.line is not None
        return (self._device.capacity() - self.line.rest_bytes) / self.line.slope_bytes - size

    def _first(self, confirm: bool) -> int:
        """Half of what earlier trials promise, or of what failed; else 1.

        On a CPU a few rows where nothing is to be confirmed: sizes that are timed there are small.
        """
        if self._sizes:
            return max(1, self._limit // 2)
        if self._hint is None:
            return 1
        half = max(1, self.predict(self._hint) // 2)
        if confirm or self._device.torch.type != "cpu":
            return half
        bundle = self._bundle
        row = bundle.spec.dataset.max_length if bundle.rows_are_packed() else bundle.data.facts.longest
        return min(half, max(1, ENOUGH_TOKENS // row))

    def _next(self, confirm: bool) -> int | None:
        """The next size, or None when the last one is close enough."""
        if not self.fitted:
            return self._first(confirm)
        largest = max(self.fitted)
        if largest >= self._limit:
            return None
        if self.line is None:  # another child ran this one size
            return max(largest + 1, self._limit // 2) if self._failed else largest
        predicted = self.predict()
        if len(self.fitted) == 1 and not self._trusted and predicted > largest:
            return min(predicted, max(largest + 1, min(int(predicted / FAR), MOST_GROWTH * largest)))
        if not confirm or predicted <= largest * WORTH_ANOTHER:
            return None
        if self._bend is None and not self._trusted and predicted > SPAN * largest:
            return min(int(predicted / FAR), MOST_GUESSED * largest)
        if self._bend is not None and self._room(largest) < ROOM_FOR_TWO:
            return None  # one more at most could fit, by a line that has been put to the test
        if self._failed and not any(probe.phase == self._phase for probe in self.probes):
            # The line has just been wrong by an unknown amount: first a safe distance below, then up again.
            return max(largest + 1, int(predicted * STEP_BACK) if self._failed == 1 else (largest + predicted) // 2)
        return predicted

    def search(self, confirm: bool = True, first: int | None = None) -> Found:
        """Up to MOST_SIZES sizes from `first` on; without `confirm` the prediction is not run."""
        if first and not self.fitted and self._sizes == 0:
            self.run(min(first, self._limit))
        while self._limit >= 1 and self._sizes < MOST_SIZES:
            size = self._next(confirm)
            if size is None:
                break
            self.run(size)
        largest = max(self.fitted, default=0)
        predicted = max(largest, self.predict() if self.line and self.fitted else 0)
        limited_by = self._limited_by if predicted >= self._limit else "memory"
        return Found(largest, predicted, limited_by, self.line, self.probes)


def largest(
    bundle: Bundle,
    tell: Tell,
    confirm: bool = True,
    known: Known | None = None,
    phase: ProbePhase = ProbePhase.training,
) -> Found:
    """The largest micro batch of the bundle as it is; the out-of-memory error passes through."""
    bundle.device.exact_memory(True)
    try:
        with without_learning(bundle):
            return Search(bundle, ProbePhase.training, full_step, bound(bundle), tell, known or Known()).search(confirm)
    finally:
        bundle.device.exact_memory(False)


def recompiled(bundle: Bundle, tell: Tell, eager: Found, known: Known) -> Found:
    """The line fitted again once compiled, also upwards: compiled code often needs less. Eager probes are kept."""
    search = Search(bundle, ProbePhase.compiled, full_step, bound(bundle), tell, known)
    bundle.device.exact_memory(True)
    try:
        with without_learning(bundle):
            found = search.search(first=max(1, eager.largest // 2))
    finally:
        bundle.device.exact_memory(False)
    found.probes = eager.probes + found.probes
    return found


def evaluation(bundle: Bundle, tell: Tell, trained: int, known: Known | None = None, confirm: bool = True) -> int:
    """A batch to evaluate with: half of the largest by forward only, or the training's largest, which fits.

    Without `confirm` it is a quarter of what the line promises.
    """
    rows = bundle.data.facts.validation_rows
    limit = min((rows, "dataset size"), (MOST_EVALUATED, "no gain past it"))
    search = Search(bundle, ProbePhase.evaluation, evaluation_step, limit, tell, known or Known())
    bundle.device.exact_memory(True)
    bundle.model.eval()
    try:
        found = search.search(confirm, first=trained)
        # Speed has saturated long before, and a run's memory is not as tidy as a probe's: no need to go to the edge.
        return max(1, trained, found.largest // 2, 0 if confirm else found.predicted // 4)
    finally:
        bundle.model.train()
        bundle.device.exact_memory(False)


def fits(bundle: Bundle, micro: int, tell: Tell | None = None) -> None:
    """Run the worst case of `micro` as it will be timed, learning rate 0; the out-of-memory error passes through."""
    if tell:
        tell.begun(micro)
    with without_learning(bundle):
        full_step(bundle, micro)

"""Finds the largest micro batch that fits in memory: measure small ones, predict the largest, run it, correct.

The peak bytes of small full steps give a line over the batch size, which every further step corrects. A full step is
forward, backward, clipping and an optimizer step whose state is allocated, on the worst batch that the batching can
make, with the gradients of an earlier micro batch in place where the step accumulates. The learning rate is 0
meanwhile, so the weights stay as they are. The memory of forward and backward grows with the batch and that of the
update does not, so the two peaks are read apart; a small batch's update would otherwise hide the line
(docs/decisions/0007). An out-of-memory error is reported and ends the child; the next child goes on from the probes
that are known.
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
from training.batches import moved
from training.levers.batching import pack
from training.levers.evaluation import LONGEST_GENERATED, generated_ids
from training.recipe import apply
from training.step import autocast
from worker.child import steps
from worker.child.build import Bundle
from worker.child.worst import evaluation_batch, worst_case
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
MOST_EVALUATED = 256  # samples an evaluation batch
ENOUGH_TOKENS = 1024  # padded tokens of a step that only checks a line that earlier trials have measured
SETTLED_AFTER = 3  # more steps of a size, after one that freed the allocator's cache: the last must not free it again
FullStep = Callable[[Bundle, int, bool], tuple[int, int]]
Tell = Callable[[ChildMessage], None]  # sends a message to the worker, which outlives a child that memory kills


@dataclass(frozen=True)
class Known:
    """What is known before a child begins: the probes of the trial's earlier children, and earlier trials' line."""

    probes: tuple[Probe, ...] = ()
    line: MemoryLine | None = None


@dataclass
class Found:
    """The result of a search. The size `largest` was run; `predicted` is the largest by the line, within the bounds."""

    largest: int
    predicted: int
    limited_by: str
    line: MemoryLine | None = None
    probes: list[Probe] = field(default_factory=list)


@contextlib.contextmanager
def without_learning(bundle: Bundle) -> Iterator[None]:
    """A context in which steps leave the weights as they are, because the learning rate is 0."""
    rates = [float(group["lr"]) for group in bundle.optimizer.param_groups]
    _set_rates(bundle, [0.0] * len(rates))
    try:
        yield
    finally:
        _set_rates(bundle, rates)


def _set_rates(bundle: Bundle, rates: list[float]) -> None:
    """Set the learning rate of each group; torchao keeps rates as tensors, and refuses numbers in their place."""
    for group, rate in zip(bundle.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def bound(bundle: Bundle) -> tuple[int, str]:
    """(the largest micro batch that makes sense whatever the memory, the name of what limits it)."""
    effective, data = bundle.configuration.effective_batch_size, bundle.data
    bounds = [(effective, "effective batch"), (data.facts.rows, "dataset size")]
    if bundle.recipe.rows_are_packed:
        longest = sorted(range(len(data.lengths)), key=lambda one: -data.lengths[one])[:effective]
        rows = len(pack(longest, data.lengths, bundle.spec.dataset.max_length))
        bounds[0] = (rows, "effective batch")
    if bundle.spec.search.max_micro_batch_size:
        bounds.append((bundle.spec.search.max_micro_batch_size, "search.max_micro_batch_size"))
    return min(bounds, key=lambda one: one[0])


def _begin(device: Device, from_empty: bool) -> None:
    """Begin a peak, which without `from_empty` also holds what the allocator keeps of what was freed before."""
    if from_empty:
        device.empty_cache()
    device.reset_peak()


def full_step(bundle: Bundle, micro: int, from_empty: bool = True) -> tuple[int, int]:
    """One step on the worst-case batch; (peak bytes of forward and backward, peak bytes of the update).

    Without `from_empty` the allocator's cache is as the step before has left it, as it is in a run.
    """
    device = bundle.device
    if micro < bound(bundle)[0] and not bundle.recipe.steps_in_backward:
        for parameter in bundle.model.parameters():
            if parameter.requires_grad:  # as an earlier micro batch of the same step leaves the gradients
                parameter.grad = torch.zeros_like(parameter)
    batch, terms = worst_case(bundle, micro)
    _begin(device, from_empty)
    steps.forward_backward(bundle, batch, torch.tensor(terms, device=device.torch))
    device.synchronize()
    step = device.peak()
    del batch
    _begin(device, from_empty)
    steps.update(bundle)
    device.synchronize()
    return step, device.peak()


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluation_step(bundle: Bundle, size: int, from_empty: bool = True) -> tuple[int, int]:
    """One worst-case evaluation batch, with generation and its KV cache where the recipe generates; (peak bytes, 0)."""
    _begin(bundle.device, from_empty)
    recipe, device = bundle.recipe, bundle.device.torch
    batch = moved(evaluation_batch(bundle, size), device, recipe)
    changed = apply(recipe.evaluation, bundle.model) if recipe.evaluation else contextlib.nullcontext()
    with changed as score, autocast(device, recipe):
        float(bundle.model(**batch).loss)
        if score:
            longest = min(LONGEST_GENERATED, batch["input_ids"].shape[1] // 2)
            generated_ids(bundle.model, batch["input_ids"][:, :-longest].tolist(), longest, bundle.pad, longest)
    bundle.device.synchronize()
    return bundle.device.peak(), 0


class Search:
    """One search for the largest size that fits in a phase (training, compiled, evaluation), up to a limit."""

    def __init__(
        self, bundle: Bundle, phase: ProbePhase, step: FullStep, limit: tuple[int, str], tell: Tell, known: Known
    ):
        self._device: Device = bundle.device
        self._bundle, self._phase, self._step, self._tell = bundle, phase, step, tell
        self._hint = known.line if phase == ProbePhase.training else None
        # Predictions from a single size are trusted where earlier trials have measured a line, and outside training.
        self._trusted = self._hint is not None or phase != ProbePhase.training
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
        peak, update = self._step(self._bundle, size, True)
        seconds = time.perf_counter() - started
        retries.append(self._device.retries())
        while retries[-1] > retries[-2] and len(retries) < 2 + SETTLED_AFTER:
            self._step(self._bundle, size, False)
            retries.append(self._device.retries())
        self._device.empty_cache()  # which is no part of the memory at rest
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
        self._tell(ProbeDone(probe=probe))
        self.probes.append(probe)
        self._sizes += 1
        if retries[-1] > retries[-2]:
            # Each step had the allocator free its cache and retry (the signal that MosaicML Composer uses): the size
            # fits now, but would run out of memory in a longer run.
            self._lower(size, "allocator retries")
            return
        if len(retries) > 2:
            # Only the first steps had to free the cache. The segments that they left suit the size, so it fits, with
            # hardly room for more.
            self.fitted[size] = probe
            self._limit, self._limited_by = size, "memory"
            return
        if len(self.fitted) > 1 and self.line is not None:
            away = abs(peak - (self.line.rest_bytes + self.line.slope_bytes * size))
            self._residual = max(self._residual or 0.0, away / self._device.capacity())
            self._bend = away / max(1, abs(size - max(self.fitted)))
        self.fitted[size] = probe
        self._fit()

    def _fit(self) -> None:
        """Fit the line through the two largest sizes, or through one size and the memory at rest between steps.

        Sizes for which the allocator freed its cache are left out: their peaks lack what was freed on the way.
        """
        whole = [(size, probe) for size, probe in sorted(self.fitted.items()) if not probe.retries]
        points = [(size, float(probe.peak_bytes or 0)) for size, probe in whole][-2:]
        if not points or (len(points) == 1 and self._rest is None):
            return  # one size gives no slope without the memory at rest, which is unknown of another child
        (first, low), (last, high) = ((0, float(self._rest or 0)), points[0]) if len(points) == 1 else points
        slope = max(1.0, (high - low) / (last - first))
        update = max(float(probe.update_bytes or 0) for probe in self.fitted.values())
        self.line = MemoryLine(
            rest_bytes=high - slope * last, slope_bytes=slope, update_bytes=update, residual=self._residual
        )

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
        if self._failed and not any(probe.phase == self._phase for probe in self.probes):
            # A predicted size ran out of memory, so the line's error is unknown: first a smaller size, then up again.
            return max(largest + 1, int(predicted * STEP_BACK) if self._failed == 1 else (largest + predicted) // 2)
        return predicted

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
    """Search for the largest micro batch of the bundle, not compiled; an out-of-memory error passes through."""
    bundle.device.exact_memory(True)
    try:
        with without_learning(bundle):
            return Search(bundle, ProbePhase.training, full_step, bound(bundle), tell, known or Known()).search(confirm)
    finally:
        bundle.device.exact_memory(False)


def recompiled(bundle: Bundle, tell: Tell, eager: Found, known: Known) -> Found:
    """Search again with the compiled model, which often needs less memory; the eager probes stay in the result."""
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
    """A batch size to evaluate with: half of the largest that was run, or the training's largest if that is larger.

    Without `confirm` few sizes are run, so a quarter of the predicted largest counts as well.
    """
    rows = bundle.data.facts.validation_rows
    limit = min((rows, "dataset size"), (MOST_EVALUATED, "no gain past it"))
    search = Search(bundle, ProbePhase.evaluation, evaluation_step, limit, tell, known or Known())
    bundle.device.exact_memory(True)
    bundle.model.eval()
    try:
        found = search.search(confirm, first=trained)
        # Half is enough: a larger batch is hardly faster, and a long run's memory is more fragmented than a probe's.
        return max(1, trained, found.largest // 2, 0 if confirm else found.predicted // 4)
    finally:
        bundle.model.train()
        bundle.device.exact_memory(False)


def fits(bundle: Bundle, micro: int, tell: Tell | None = None) -> None:
    """Run the worst-case step of `micro` at learning rate 0 on the model as it will be timed.

    That proves that the size fits, and warms it up. An out-of-memory error passes through.
    """
    if tell:
        tell(ProbeStarted(micro_batch_size=micro))
    with without_learning(bundle):
        full_step(bundle, micro)

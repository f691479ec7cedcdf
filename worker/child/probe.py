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
from collections.abc import Iterator, Sequence

import torch

from service.contract.child import ProbeStarted
from service.contract.measurement import Probe
from service.contract.states import ProbePhase
from training.batches import moved, padded_width
from training.levers.batching import pack
from training.levers.evaluation import LONGEST_GENERATED, generated_ids
from training.recipe import apply
from training.step import autocast
from worker.child import steps
from worker.child.build import Bundle
from worker.child.size_search import EarlierProbes, Found, Search, StepPeaks, Tell
from worker.child.worst import evaluation_batch, worst_case
from worker.devices import Device

MOST_EVALUATED = 256  # samples an evaluation batch


@contextlib.contextmanager
def without_learning(bundle: Bundle) -> Iterator[None]:
    """A context in which steps leave the weights as they are, because the learning rate is 0.

    Gradients are not scaled up meanwhile: a scaler skips the updates of its first steps, whose gradients overflow, and
    without an update an optimizer may not allocate its state.
    """
    rates, scaler = [float(group["lr"]) for group in bundle.optimizer.param_groups], bundle.scaler
    _set_rates(bundle, [0.0] * len(rates))
    if scaler:
        bundle.scaler = torch.amp.GradScaler(bundle.device.torch.type, init_scale=1.0)
    try:
        yield
    finally:
        _set_rates(bundle, rates)
        bundle.scaler = scaler


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
        rows = len(pack(longest, data.lengths, bundle.spec.dataset.max_length, effective))
        bounds[0] = (rows, "effective batch")
    if bundle.spec.search.max_micro_batch_size:
        bounds.append((bundle.spec.search.max_micro_batch_size, "search.max_micro_batch_size"))
    return min(bounds, key=lambda one: one[0])


def _begin(device: Device, from_empty: bool) -> None:
    """Begin to measure a peak; without `from_empty` it includes freed memory that the allocator still holds."""
    if from_empty:
        device.empty_cache()
    device.reset_peak()


def full_step(bundle: Bundle, micro: int, from_empty: bool = True) -> StepPeaks:
    """The peaks of one step on the worst-case batch.

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
    step, unfreeable = device.peak(), device.peak_unfreeable()
    del batch
    _begin(device, from_empty)
    steps.update(bundle)
    device.synchronize()
    return StepPeaks(step, device.peak(), unfreeable)


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluation_step(bundle: Bundle, size: int, from_empty: bool = True) -> StepPeaks:
    """The peak of one worst-case evaluation batch, with generation and its KV cache where the recipe generates."""
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
    return StepPeaks(bundle.device.peak())


@contextlib.contextmanager
def _exact_memory(device: Device) -> Iterator[None]:
    """A context in which the memory in use is exactly what is allocated."""
    device.exact_memory(True)
    try:
        yield
    finally:
        device.exact_memory(False)


def largest(bundle: Bundle, tell: Tell, confirm: bool = True, known: EarlierProbes | None = None) -> Found:
    """Search for the largest micro batch of the bundle, not compiled; an out-of-memory error passes through.

    Sizes that fit only because the allocator frees its cache are searched for where an adapter trains. Gradients and
    optimizer state are small there; those of full finetuning are made between a run's activations, and keep the memory
    of these from being freed. A model that will be compiled is searched again as such.
    """
    beyond = bundle.configuration.method != "full" and not bundle.compiled
    search = Search(bundle, ProbePhase.training, full_step, bound(bundle), tell, known or EarlierProbes(), beyond)
    with _exact_memory(bundle.device), without_learning(bundle):
        return search.search(confirm)


def recompiled(bundle: Bundle, tell: Tell, eager: Found, known: EarlierProbes) -> Found:
    """Search again with the compiled model, which often needs less memory; the eager probes stay in the result."""
    search = Search(bundle, ProbePhase.compiled, full_step, bound(bundle), tell, known)
    with _exact_memory(bundle.device), without_learning(bundle):
        found = search.search(first=max(1, eager.largest // 2))
    found.probes = eager.probes + found.probes
    return found


def evaluated_rows(bundle: Bundle, largest: int, known: Sequence[Probe] = ()) -> int:
    """The batch size to evaluate with where evaluations have no probe of their own: as many rows as fit in training.

    Where rows are packed, as many samples as have the tokens of these rows when all are as wide as the longest. It is
    less than any size that ran out of memory in an evaluation before.
    """
    found, recipe = max(1, largest), bundle.recipe
    width = padded_width(max(len(ids) for ids, _ in bundle.data.validation), recipe)
    if recipe.rows_are_packed:
        found = max(found, min(MOST_EVALUATED, found * recipe.max_length // width))
    else:  # the validation's longest may be longer than any that was trained
        found = max(1, min(found, found * padded_width(max(bundle.data.lengths), recipe) // width))
    failed = [one.micro_batch_size for one in known if one.phase is ProbePhase.evaluation and not one.fits]
    while failed and found >= min(failed) and found > 1:
        found //= 2
    return found


def evaluation(
    bundle: Bundle, tell: Tell, trained: int, known: EarlierProbes | None = None, confirm: bool = True
) -> int:
    """A batch size to evaluate with: half of the largest that was run, or the training's largest if that is larger.

    Without `confirm` few sizes are run, so a quarter of the predicted largest counts as well. The training's largest
    does not count where it, or a smaller size, ran out of memory when an earlier child evaluated with it.
    """
    seen = [probe for probe in (known or EarlierProbes()).probes if probe.phase == ProbePhase.evaluation]
    least = 1 if any(not probe.fits and probe.micro_batch_size <= trained for probe in seen) else max(1, trained)
    rows = bundle.data.facts.validation_rows
    limit = min((rows, "dataset size"), (MOST_EVALUATED, "no gain past it"))
    search = Search(bundle, ProbePhase.evaluation, evaluation_step, limit, tell, known or EarlierProbes())
    bundle.model.eval()
    try:
        with _exact_memory(bundle.device):
            found = search.search(confirm, first=trained)
    finally:
        bundle.model.train()
    # Half is enough: a larger batch is hardly faster, and a long run's memory is more fragmented than a probe's.
    return max(least, found.largest // 2, 0 if confirm else found.predicted // 4)


def fits(bundle: Bundle, micro: int, tell: Tell | None = None) -> None:
    """Run the worst-case step of `micro` at learning rate 0 on the model as it will be timed.

    That proves that the size fits, and warms it up. An out-of-memory error passes through.
    """
    if tell:
        tell(ProbeStarted(micro_batch_size=micro))
    with without_learning(bundle):
        full_step(bundle, micro)

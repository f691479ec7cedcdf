"""The training loop: one optimizer step over micro batches. Plain and short, so that nothing hides from the clock."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from service.exports.templates.common import Sample, gradient_norm
from service.exports.templates.segments import TOLD, moved, segments
from service.levers import LEVERS
from worker.child.arrange import MicroBatch, Step
from worker.child.build import Bundle, load_options
from worker.child.problem import TrialProblem, Unstable
from worker.levers import batching, function
from worker.tasks.base import Batch


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: mean loss a token (or sample) and the gradient norm before clipping."""

    loss: float
    grad_norm: float


MOST_SKIPPED = 20
Loaded = tuple[list[Batch], int, int]  # a step's batches, the terms of its loss, its tokens


def no_mark() -> None:
    """Takes the place of the clock where nobody times."""


def collate(bundle: Bundle, micro_batch: MicroBatch) -> Batch:
    """A micro batch's tensors on the host."""
    rows = [[bundle.data.train[sample] for sample in row] for row in micro_batch]
    choice = bundle.configuration.levers["batching"]
    width = bundle.width(max(sum(len(ids) for ids, _ in row) for row in rows))
    return tensors(bundle, rows, batching.needs_mask(choice), batching.is_packed(choice), width)


def tensors(bundle: Bundle, rows: list[list[Sample]], mask: bool, packed: bool, width: int = 0) -> Batch:
    """Rows of samples as the task has them, with their ends where the attention kernel is told of them."""
    batch = bundle.task.collate(rows, bundle.pad, mask, packed, width)
    attention = load_options(bundle.configuration)["attn_implementation"]
    if attention == "varlen" or (attention in TOLD and packed):
        batch |= segments(rows, batch["input_ids"].shape[1])
    return batch


def loaded(bundle: Bundle, steps: Iterable[Step]) -> Generator[Loaded]:
    """Each step's batches, the terms of its loss and its tokens, made where the lever says."""
    choice = LEVERS["loading"].choice(bundle.configuration.levers["loading"])

    def make(step: Step) -> Loaded:
        lengths = bundle.data.lengths
        return *prepare(bundle, step), sum(lengths[sample] for micro in step for row in micro for sample in row)

    pin = bundle.device.torch.type == "cuda"
    made: Generator[Loaded] = function("loading", choice)(steps, make, pin, **choice.options)
    return made


def prepare(bundle: Bundle, step: Step) -> tuple[list[Batch], int]:
    """A step's batches and the number of its loss terms."""
    items = sum(bundle.task.items(bundle.data.train[sample]) for micro in step for row in micro for sample in row)
    return [collate(bundle, micro) for micro in step], items


def forward_backward(bundle: Bundle, batch: Batch, items: torch.Tensor) -> torch.Tensor:
    """One micro batch; its share of the step's loss, still on the device."""
    batch = moved(batch, bundle.device.torch)
    if bundle.compiled():
        torch.compiler.cudagraph_mark_step_begin()
    with bundle.autocast():
        loss = bundle.task.loss(bundle.model, batch, items)
    (bundle.scaler.scale(loss) if bundle.scaler else loss).backward()
    return loss.detach().clone()  # a CUDA graph writes the next one over it


def update(bundle: Bundle) -> torch.Tensor:
    """Clip, step, and clear the gradients; the gradient norm before clipping, still on the device."""
    if bundle.scaler:
        bundle.scaler.unscale_(bundle.optimizer)
    norm = gradient_norm(bundle.model, bundle.optimizer, bundle.spec.training.max_grad_norm)
    if bundle.scaler:
        bundle.scaler.step(bundle.optimizer)
        bundle.scaler.update()
    else:
        bundle.optimizer.step()
    bundle.optimizer.zero_grad()
    if bundle.configuration.levers["cache"] == "emptied":
        torch.cuda.empty_cache()
    return norm


def optimizer_step(
    bundle: Bundle, batches: list[Batch], items: int, mark: Callable[[], None] = no_mark
) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole step; (loss, gradient norm), not synchronised. `mark` is called after each micro batch and the update."""
    if len(batches) > 1 and hasattr(bundle.optimizer, "held"):
        raise TrialProblem("an optimizer that steps in the backward pass takes a step in one micro batch")
    count = torch.full((), items, device=bundle.device.torch)  # a kernel: a copy would wait for the device
    losses = []
    for batch in batches:
        losses.append(forward_backward(bundle, batch, count))
        mark()
    norm = update(bundle)
    mark()
    return torch.stack(losses).sum(), norm


def check(bundle: Bundle, result: StepResult, step: int) -> None:
    """Unstable when a step's loss or gradient norm is not finite, or the norm is zero.

    With a gradient scaler a few infinite norms in a row are its way to find the scale: those steps are skipped.
    """
    if not math.isfinite(result.loss):
        raise Unstable(f"the loss of step {step} is {result.loss}")
    skipped = bundle.scaler is not None and not math.isfinite(result.grad_norm)
    bundle.skipped = bundle.skipped + 1 if skipped else 0
    if skipped and bundle.skipped <= MOST_SKIPPED:
        return
    if not math.isfinite(result.grad_norm):
        raise Unstable(f"the gradient norm of step {step} is {result.grad_norm}")
    if result.grad_norm == 0:
        raise Unstable(f"the gradient norm of step {step} is zero: nothing is learnt")


@contextlib.contextmanager
def without_dropout(model: Any) -> Iterator[bool]:
    """Dropout off while the model stays in training mode; yields whether there was any."""
    saved: list[tuple[Any, str, float]] = []
    for module in model.modules():
        names = ("p",) if isinstance(module, torch.nn.Dropout) else ("attention_dropout", "dropout", "dropout_prob")
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0:
                saved.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield bool(saved)
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def reference_step(bundle: Bundle, step: Step) -> StepResult:
    """Loss and gradient norm of a step on the weights as they are, dropout off, nothing updated."""
    batches, items = prepare(bundle, step)
    count = torch.tensor(items, device=bundle.device.torch)
    for _ in range(MOST_SKIPPED):
        with without_dropout(bundle.model), held(bundle.optimizer):
            losses = [forward_backward(bundle, batch, count) for batch in batches]
        if bundle.scaler:
            bundle.scaler.unscale_(bundle.optimizer)
        norm = gradient_norm(bundle.model, bundle.optimizer, 0.0)
        bundle.optimizer.zero_grad()
        if bundle.scaler is None:
            break
        bundle.scaler.update()  # halves the scale after an overflow
        if bool(torch.isfinite(norm)):
            break
    return StepResult(float(torch.stack(losses).sum()), float(norm))


def held(optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    """Keeps an optimizer that steps in the backward pass from doing so."""
    return optimizer.held() if hasattr(optimizer, "held") else contextlib.nullcontext()


def forget(bundle: Bundle) -> None:
    """The optimizer as it began, its state zeroed in place rather than made anew; the gradient scale settled."""
    if type(bundle.optimizer).__module__.startswith("torchao"):
        bundle.new_optimizer()  # its states are tensors of their own kind, which cannot be zeroed
    for state in bundle.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not name.startswith("qmap"):  # bitsandbytes' code book stays
                value.zero_()
            elif name == "step":
                state[name] = 0
    if bundle.scaler:
        reference_step(bundle, [[[0]]])


def trained_sum(model: torch.nn.Module) -> float:
    """A checksum of the trained weights, to see that they change."""
    return float(sum(one.detach().double().abs().sum() for one in model.parameters() if one.requires_grad))

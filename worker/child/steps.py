"""Optimizer steps of a bundle: those of training/step.py, with marks for timing, and checks of what they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from training import batches as training_batches
from training import step as training_step
from training.batches import Prepared
from training.errors import TrainingError
from training.optimization import gradient_norm
from training.samples import Batch, Step
from worker.child.build import Bundle

PIECE = 1 << 24  # weights of which a checksum takes a copy at a time
OF_HEADS = ("classifier_", "summary_", "seq_classif_")  # how the names of heads' dropout rates begin, in configurations


@dataclass(frozen=True)
class StepResult:
    """An optimizer step's mean loss a token (or a sample, for classification) and gradient norm before clipping."""

    loss: float
    grad_norm: float


def prepare(bundle: Bundle, step: Step) -> Prepared:
    """(a step's batches on the host, the number of terms of its loss, its number of tokens without padding)."""
    return training_batches.prepare(step, bundle.data.train, bundle.pad, bundle.recipe)


def prepared(bundle: Bundle, steps: Iterable[Step]) -> Generator[Prepared]:
    """`prepare` of each step in turn, in this process or in others, as the lever `loading` says."""
    return training_batches.prepared(steps, bundle.data.train, bundle.pad, bundle.recipe)


def forward_backward(bundle: Bundle, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    """Forward and backward of one micro batch; its share of the step's loss, still on the device."""
    device = bundle.device.torch
    return training_step.forward_backward(bundle.model, bundle.scaler, batch, count, device, bundle.recipe)


def update(bundle: Bundle) -> torch.Tensor:
    """Clip the gradients, step, and clear them; the gradient norm before clipping, still on the device."""
    return training_step.update(bundle.model, bundle.optimizer, bundle.scaler, bundle.recipe)


def optimizer_step(
    bundle: Bundle, batches: list[Batch], terms: int, mark: Callable[[], None] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a whole step without waiting for the device; (loss, gradient norm), still on the device.

    `mark` is called after each micro batch and after the update.
    """
    if len(batches) > 1 and bundle.recipe.steps_in_backward:
        sentence = "an optimizer that steps in the backward pass takes a step in one micro batch"
        raise TrainingError(sentence, "configuration")
    device, given = bundle.device.torch, _marked(batches, mark) if mark else batches
    result = training_step.optimizer_step(
        bundle.model, bundle.optimizer, bundle.scaler, given, terms, device, bundle.recipe
    )
    if mark:
        mark()
    return result


def _marked(batches: list[Batch], mark: Callable[[], None]) -> Iterator[Batch]:
    """The batches; `mark` is called when the next batch is asked for, which is after the one before it was launched."""
    for batch in batches:
        yield batch
        mark()


def check(bundle: Bundle, result: StepResult, step: int) -> None:
    """TrainingError when a step's loss or gradient norm is not finite, or the norm is zero.

    An overflow for which an fp16 gradient scaler has skipped the update is only counted, up to MOST_SKIPPED in a row.
    """
    loss, norm = result.loss, result.grad_norm
    if bundle.recipe.loss_scaling and training_step.overflowed(loss, norm, bundle.skipped):
        bundle.skipped += 1
        return
    training_step.check_numbers(step, loss, norm)
    bundle.skipped = 0


@contextlib.contextmanager
def without_dropout(model: Any) -> Iterator[bool]:
    """A context without dropout, in which the model stays in training mode; yields whether the model has dropout.

    Models keep the rates of what they drop without a module under many names, in all of which there is "drop", and some
    read them from their configuration. That also has the rates of heads, which are modules where there are any.
    """
    saved: list[tuple[Any, str, float]] = []
    configs = {id(config): config for config in (getattr(one, "config", None) for one in model.modules()) if config}
    for holder in [*model.modules(), *configs.values()]:
        is_dropout = isinstance(holder, torch.nn.modules.dropout._DropoutNd)
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if isinstance(value, float) and value > 0 and _is_rate(name, is_dropout):
                saved.append((holder, name, value))
                setattr(holder, name, 0.0)
    try:
        yield bool(saved)
    finally:
        for holder, name, value in saved:
            setattr(holder, name, value)


def _is_rate(name: str, of_dropout: bool) -> bool:
    """Whether an attribute of that name is a dropout rate that a model may use."""
    return name == "p" if of_dropout else "drop" in name and not name.startswith(OF_HEADS)


def reference_step(bundle: Bundle, step: Step) -> StepResult:
    """Loss and gradient norm of a step on the weights as they are: dropout off, nothing clipped, nothing updated.

    A gradient scaler lowers its scale until the gradients are finite, as it would over its first steps. A compiled
    model with dropout runs uncompiled here, as it would be compiled again without dropout: a verification's replays
    compare it as it runs.
    """
    batches, terms, _ = prepare(bundle, step)
    count, unclipped = torch.tensor(terms, device=bundle.device.torch), replace(bundle.recipe, max_grad_norm=0.0)
    for _ in range(training_step.MOST_SKIPPED):
        with without_dropout(bundle.model) as had_dropout, held(bundle.optimizer), _as_it_is(bundle, had_dropout):
            losses = [forward_backward(bundle, batch, count) for batch in batches]
        if bundle.scaler:
            bundle.scaler.unscale_(bundle.optimizer)
        norm = gradient_norm(bundle.model, bundle.optimizer, unclipped)
        bundle.optimizer.zero_grad()
        if bundle.scaler is None:
            break
        bundle.scaler.update()  # halves the scale after an overflow
        if bool(torch.isfinite(norm)):
            break
    return StepResult(float(torch.stack(losses).sum()), float(norm))


def _as_it_is(bundle: Bundle, had_dropout: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which a compiled model whose dropout was switched off is not compiled again."""
    if bundle.compiled and had_dropout:
        stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return contextlib.nullcontext()


def held(optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which an optimizer that steps in the backward pass does not step."""
    return optimizer.held() if hasattr(optimizer, "held") else contextlib.nullcontext()


def replace_optimizer(bundle: Bundle) -> None:
    """Give the bundle an optimizer that knows nothing of the steps so far: a new one, where that is possible.

    A paged one forgets them in its own pages: bitsandbytes never frees those, so another would be one more set.
    """
    if getattr(bundle.optimizer, "is_paged", False):
        bundle.device.synchronize()
        _zero_states(bundle)
        for group in bundle.optimizer.param_groups:
            group["lr"] = bundle.recipe.learning_rate
    else:
        bundle.new_optimizer()


def zero_optimizer_state(bundle: Bundle) -> None:
    """Reset the optimizer to how it began, and let the gradient scaler find its scale.

    The state is zeroed in place, so that it need not be allocated again.
    """
    _zero_states(bundle)
    if bundle.scaler:
        reference_step(bundle, [[[0]]])


def _zero_states(bundle: Bundle) -> None:
    """Zero the optimizer's states in place."""
    for state in bundle.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                _zero(name, value)
            elif name == "step":
                state[name] = 0


def _zero(name: str, value: torch.Tensor) -> None:
    """Zero a tensor of an optimizer's state in place, or its parts, of which torchao's quantised states consist.

    A `qmap` is no state: in bitsandbytes and in torchao it is the constant table of what quantised values stand for.
    """
    if name.startswith("qmap"):
        return
    if is_traceable_wrapper_subclass(value):
        parts, _ = value.__tensor_flatten__()
        for part in parts:
            _zero(part, getattr(value, part))
    else:
        value.zero_()


def trained_sum(model: torch.nn.Module) -> float:
    """A checksum of the trained weights, by which a trial sees that training has changed them.

    It is summed up in pieces: a copy of an embedding of a large vocabulary in 64 bits might not fit any more.
    """
    trained = [weight.detach().flatten() for weight in model.parameters() if weight.requires_grad]
    return sum(float(piece.double().abs().sum()) for weight in trained for piece in weight.split(PIECE))

"""One optimizer step over micro batches, plain and short: everything that takes time in a run is in here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import torch

from training.batches import moved
from training.errors import TrainingError
from training.optimization import gradient_norm
from training.recipe import Recipe, task_of
from training.samples import Batch

MOST_SKIPPED = 20  # updates in a row that the gradient scaler may skip while its scale comes down from 65,536


def autocast(device: torch.device, recipe: Recipe) -> contextlib.AbstractContextManager[Any]:
    """The autocast context for the forward pass and the loss; it does nothing where the recipe has no autocast."""
    if recipe.autocast is None:
        return contextlib.nullcontext()
    if recipe.autocast_cache:
        return torch.autocast(device.type, dtype=getattr(torch, recipe.autocast))
    return torch.autocast(device.type, dtype=getattr(torch, recipe.autocast), cache_enabled=False)


def gradient_scaler(device: torch.device, recipe: Recipe) -> torch.amp.GradScaler | None:
    """The scaler that keeps fp16 gradients from underflowing under autocast; None where the recipe needs none."""
    return torch.amp.GradScaler(device.type) if recipe.loss_scaling else None


def forward_backward(
    model: Any, scaler: Any, batch: Batch, count: torch.Tensor, device: torch.device, recipe: Recipe
) -> torch.Tensor:
    """Forward and backward of a micro batch; its share of the loss of the step's `count` terms, on the device."""
    inputs = moved(batch, device, recipe)
    if recipe.compiled:
        torch.compiler.cudagraph_mark_step_begin()
    with autocast(device, recipe):
        loss = task_of(recipe).summed_loss(model, inputs, count)
    if recipe.loss_scaling:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    if recipe.compiled:
        return loss.detach().clone()  # a CUDA graph writes the next loss to the same memory
    return loss.detach()


def update(model: Any, optimizer: Any, scaler: Any, recipe: Recipe) -> torch.Tensor:
    """Clip the gradients, step, and clear them; the gradient norm before clipping, still on the device."""
    if recipe.loss_scaling:
        scaler.unscale_(optimizer)
    norm = gradient_norm(model, optimizer, recipe)
    if recipe.loss_scaling:
        scaler.step(optimizer)  # skips the update when a gradient overflowed
        scaler.update()  # and then lowers the scale
    else:
        optimizer.step()
    optimizer.zero_grad()
    if recipe.empty_cache:
        torch.cuda.empty_cache()
    return norm


def optimizer_step(
    model: Any, optimizer: Any, scaler: Any, batches: Iterable[Batch], terms: int, device: torch.device, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole step whose loss has `terms` terms; (loss, gradient norm) on the device, without waiting for it."""
    count = torch.full((), terms, device=device)  # torch.full is a kernel; a copy would wait for the device
    losses = [forward_backward(model, scaler, batch, count, device, recipe) for batch in batches]
    norm = update(model, optimizer, scaler, recipe)
    return torch.stack(losses).sum(), norm


def overflowed(loss: float, norm: float, skipped: int) -> bool:
    """Whether the gradient scaler has skipped this update, as it does a few times in a row until it finds the scale."""
    return math.isfinite(loss) and not math.isfinite(norm) and skipped < MOST_SKIPPED


def check_numbers(step: int, loss: float, norm: float) -> None:
    """TrainingError when a step's loss or gradient norm is not finite, or the norm is zero."""
    if not math.isfinite(loss) or not math.isfinite(norm) or norm == 0:
        raise TrainingError(f"step {step} went wrong: its loss is {loss}, its gradient norm {norm}", "numbers")

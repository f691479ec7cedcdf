"""Activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer


def checkpointed(model: Any) -> list[Any]:
    """The layers that transformers can checkpoint; ValueError when this model has no such layer."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        raise ValueError(f"{model.config.model_type} models have no layers that can be checkpointed one by one")
    return found


def checkpoint_layers(model: Any, every: int = 1, **more: Any) -> None:
    """In every `every`-th layer, keep only the input, and compute the rest again in the backward pass."""
    arguments = {"use_reentrant": False, **more}
    # Its name before transformers 5.23 is gradient_checkpointing_enable.
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": arguments})
    for number, layer in enumerate(checkpointed(model)):
        layer.gradient_checkpointing = number % every == 0
    if not all(parameter.requires_grad for parameter in model.parameters()):
        model.enable_input_require_grads()  # or no gradient would reach the adapters through frozen layers


DEAR = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
)
FLASH = ("_flash_attn_forward", "_flash_attn_varlen_forward")  # flash_attn's, and the hub's in a namespace of its own


def keep_what_is_dear(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Keep the results of matmuls and attention, and compute everything else again."""
    name = operation.name().partition(".")[0]
    dear = name in DEAR or name.partition("::")[2] in FLASH
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selectively(model: Any) -> None:
    """Checkpoint every layer, but keep the results that are expensive to compute."""
    checkpoint_layers(model, context_fn=partial(create_selective_checkpoint_contexts, keep_what_is_dear))


def checkpoint_offloaded(model: Any) -> None:
    """Checkpoint every layer, its input kept in host memory.

    Hooks move saved tensors. Since torch 2.13 a layer's input is one without reentrance too; in older versions of torch
    it stays on the device unless checkpointing is reentrant.
    """
    checkpoint_layers(model)
    pinned = torch.cuda.is_available()
    reentrant = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

    def offloaded(function: Callable[..., Any], *inputs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            return checkpoint(function, *inputs, use_reentrant=reentrant)

    for layer in checkpointed(model):
        layer._gradient_checkpointing_func = offloaded

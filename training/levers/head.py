"""Computes the cross-entropy without a tensor of all logits.

In training, the output layer returns its input in place of logits, and the model's loss computes logits itself.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from training.errors import TrainingError

CHUNK = 1024  # positions
Loss = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


def chunked_cross_entropy(model: Any) -> None:
    """Cross-entropy over the labelled positions, CHUNK at a time."""

    def part(hidden: torch.Tensor, labels: torch.Tensor, head: Any) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def loss(hidden: torch.Tensor, labels: torch.Tensor, head: Any) -> torch.Tensor:
        parts = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
        return torch.stack([checkpoint(part, *one, head, use_reentrant=False) for one in parts]).sum()

    defer_logits(model, loss)


def cut_cross_entropy(model: Any) -> None:
    """Apple's kernel; its inputs are cast to autocast's dtype where autocast is on."""
    kernel = import_module("cut_cross_entropy").linear_cross_entropy

    def loss(hidden: torch.Tensor, labels: torch.Tensor, head: Any) -> torch.Tensor:
        kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else head.weight.dtype
        if kind not in (torch.bfloat16, torch.float16):
            raise TrainingError("cut-cross-entropy computes in 16 bits only, and this model in more", "configuration")
        if head.bias is not None:
            raise TrainingError("cut-cross-entropy takes no bias, which this output layer has", "configuration")
        found: torch.Tensor = kernel(hidden.to(kind), head.weight.to(kind), labels, reduction="sum")
        return found

    defer_logits(model, loss)


def liger_cross_entropy(model: Any) -> None:
    """Liger's kernel. It gets no ignored labels, as with them its result was silently wrong in compiled models.

    It computes the loss piece by piece, and adds the pieces' gradients of the output layer's weights in fp32.
    """
    made = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    kernel = made(reduction="sum", accum_dtype=torch.float32)

    def loss(hidden: torch.Tensor, labels: torch.Tensor, head: Any) -> torch.Tensor:
        kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else head.weight.dtype
        found: torch.Tensor = kernel(head.weight.to(kind), hidden.to(kind), labels, head.bias)
        return found

    defer_logits(model, loss)


def lacking_plain_logits(base: Any) -> str | None:
    """Why a model's logits are not its output layer's product alone; None where they are."""
    config = base.config.get_text_config()
    capped = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    for name in (*capped, "logit_scale", "logits_scaling", "unpadded_vocab_size"):
        if getattr(config, name, None) not in (None, 1.0):
            return f"this model changes its logits ({name}), so its loss cannot be computed without them"
    head = base.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return f"the output layer is a {type(head).__name__}, so its weights alone do not make the logits"
    return None


def defer_logits(model: Any, loss: Loss) -> None:
    """Give the model's loss the output layer's input in training; ValueError where the model changes its logits."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if reason := lacking_plain_logits(base):
        raise ValueError(reason)
    head = base.get_output_embeddings()
    logits = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return hidden if base.training else logits(hidden)

    plain = base.loss_function

    def loss_function(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        target_positions: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        if not base.training:
            found: torch.Tensor = plain(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, **more)
            return found
        if target_positions is None:  # with a trainer's own batches; finding them waits for the GPU
            counted = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))
            target_positions = counted.flatten().nonzero().squeeze(1)
        hidden = logits.flatten(0, 1).index_select(0, target_positions)
        target = labels.flatten().index_select(0, target_positions + 1)
        return loss(hidden, target, head) / (len(target) if num_items_in_batch is None else num_items_in_batch)

    head.forward = forward
    base.loss_function = loss_function

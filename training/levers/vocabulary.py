"""The output layer's matmul at a size that kernels compute faster."""

from __future__ import annotations

from typing import Any

import torch


def pad_head(model: Any, multiple: int) -> None:
    """Pad the output layer's matmul with zero columns up to a multiple, and cut their logits off.

    The stored weights stay as they are (tied weights stay tied, and what is saved fits the checkpoint), as they are
    padded at each use. The extra logits are cut off before the loss, so the loss is the same. Nothing changes where the
    vocabulary is such a multiple already.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise ValueError(f"the output layer is a {type(head).__name__}, which cannot be padded")
    size = head.weight.shape[0]
    extra = -size % multiple
    if not extra:
        return

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        weight = torch.nn.functional.pad(head.weight, (0, 0, 0, extra))
        bias = None if head.bias is None else torch.nn.functional.pad(head.bias, (0, extra))
        return torch.nn.functional.linear(hidden, weight, bias)[..., :size]

    head.forward = forward

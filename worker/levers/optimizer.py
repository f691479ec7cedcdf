"""Builds the optimizer, with no weight decay on biases and norms (as BERT and Trainer do)."""

from __future__ import annotations

from typing import Any

import torch

NAME = "optimizer"
TORCH = {
    "adamw-loop": {"foreach": False, "fused": False},
    "adamw-foreach": {"foreach": True},
    "adamw-fused": {"fused": True},
}


def groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with decay, vectors (biases, norms) without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]


def build(choice: str, model: torch.nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """The optimizer; KeyError for an unknown choice."""
    parameters = [group for group in groups(model, weight_decay) if group["params"]]
    if choice in TORCH:
        return torch.optim.AdamW(parameters, lr=learning_rate, **TORCH[choice])
    import bitsandbytes as bnb

    kinds = {"adamw-8bit": bnb.optim.AdamW8bit, "paged-adamw-8bit": bnb.optim.PagedAdamW8bit}
    return kinds[choice](parameters, lr=learning_rate)

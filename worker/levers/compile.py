"""Applies torch.compile to each transformer layer in place."""

from __future__ import annotations

from typing import Any

import torch

NAME = "compile"


def layers(model: Any) -> list[torch.nn.Module]:
    """The modules of the longest ModuleList: a transformer's layers, wherever the family keeps them."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) > 0]
    return max((list(one) for one in lists), key=len, default=[])


def model(choice: str, model: Any, method: str) -> None:
    """Compile each layer with dynamic shapes. Whole-model compile would build sdpa's dense mask."""
    if choice == "per-layer":
        for layer in layers(model):
            layer.compile(dynamic=True)

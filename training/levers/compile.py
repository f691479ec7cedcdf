"""torch.compile."""

from __future__ import annotations

from typing import Any

import torch


def layers_of(model: Any) -> list[Any]:
    """The modules of the longest ModuleList, which is a transformer's list of layers, whatever its name."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    return list(max(lists, key=len, default=()))


def without_wrong_gradients() -> None:
    """Switch off inductor's mix-order reductions, under which chained norms get silently wrong gradients.

    https://github.com/pytorch/pytorch/issues/193061, from torch 2.10 on.
    """
    from torch._inductor import config

    if hasattr(config.triton, "mix_order_reduction"):
        config.triton.mix_order_reduction = False


def compile_layers(model: Any, **options: Any) -> None:
    """Compile each layer in place, for all shapes; compiling the whole model would build sdpa's dense mask."""
    without_wrong_gradients()
    for layer in layers_of(model):
        layer.compile(dynamic=True, **options)


def compile_model(model: Any, dynamic: bool = True, **options: Any) -> None:
    """Compile the whole model in place."""
    without_wrong_gradients()
    model.compile(dynamic=dynamic, **options)

"""Optimizers, each made from parameter groups and a learning rate."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def adamw(groups: list[dict[str, Any]], rate: float, **implementation: bool) -> torch.optim.Optimizer:
    """torch's AdamW: `foreach`, `fused`, or neither."""
    return torch.optim.AdamW(groups, lr=rate, **implementation)


def sgd(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """torch's SGD without momentum, as Trainer has it."""
    return torch.optim.SGD(groups, lr=rate)


def bitsandbytes_optimizer(groups: list[dict[str, Any]], rate: float, name: str) -> torch.optim.Optimizer:
    """An optimizer of bitsandbytes by its class name."""
    import bitsandbytes

    made: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(groups, lr=rate)
    return made


def torchao_optimizer(groups: list[dict[str, Any]], rate: float, name: str, **more: bool) -> torch.optim.Optimizer:
    """An optimizer of torchao by its class name. A scalar learning rate, so that it may change at every step."""
    kind = getattr(import_module("torchao.optim"), name)
    made: torch.optim.Optimizer = kind(groups, lr=torch.tensor(rate), **more)
    return made


def apex_adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """Apex's FusedAdam in its AdamW mode."""
    made: torch.optim.Optimizer = import_module("apex.optimizers").FusedAdam(groups, lr=rate, adam_w_mode=True)
    return made


def anyprecision(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """torchdistx's AnyPrecisionAdamW with Kahan summation."""
    kind = import_module("torchdistx.optimizers").AnyPrecisionAdamW
    states = {"momentum_dtype": torch.bfloat16, "variance_dtype": torch.bfloat16}
    made: torch.optim.Optimizer = kind(groups, lr=rate, use_kahan_summation=True, **states)
    return made


def adafactor(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """transformers' Adafactor at a given learning rate, as Trainer has it."""
    from transformers.optimization import Adafactor

    made: torch.optim.Optimizer = Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)
    return made


def galore_adamw(groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
    """GaLore: matrices have their gradients projected, vectors have not."""
    low_rank = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    for group in groups:
        if group["params"][0].ndim == 2:
            group.update(low_rank)
    made: torch.optim.Optimizer = import_module("galore_torch").GaLoreAdamW(groups, lr=rate)
    return made

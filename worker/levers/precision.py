"""Applies precision: dtype of the weights, autocast around forward and loss, and the gradient scaler."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from service.levers import LEVERS


def _options(levers: Mapping[str, str]) -> Mapping[str, Any]:
    return LEVERS["precision"].choice(levers["precision"]).options


def set_matmul(levers: Mapping[str, str]) -> None:
    """TF32 on or off, by the one setting that the compiler reads too: after `fp32_precision` that read raises."""
    torch.set_float32_matmul_precision(_options(levers).get("matmul", "highest"))


def weights(levers: Mapping[str, str], method: str) -> Any:
    """The dtype the weights are loaded in, or "auto". Under an adapter the frozen base may be kept in 16 bits."""
    options = _options(levers)
    kind = options.get("adapter_weights", options["weights"]) if method != "full" else options["weights"]
    return kind if kind == "auto" else getattr(torch, kind)


def autocast_dtype(levers: Mapping[str, str]) -> torch.dtype | None:
    """The dtype of autocast, or None without."""
    kind = _options(levers).get("autocast")
    return getattr(torch, kind) if kind else None


def autocast(levers: Mapping[str, str], device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of forward and loss."""
    dtype = autocast_dtype(levers)
    if dtype is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.autocast(
        device.type, dtype=dtype, cache_enabled=_options(levers).get("cache", True)
    )
    return context


def scaler(levers: Mapping[str, str], device: torch.device) -> torch.amp.GradScaler | None:
    """A gradient scaler for fp16 under autocast, whose gradients would underflow without."""
    return torch.amp.GradScaler(device.type) if _options(levers).get("scaler") else None

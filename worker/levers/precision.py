"""Applies precision: dtype of the weights, autocast around forward and loss, and the gradient scaler."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

NAME = "precision"
AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def process(choice: str) -> None:
    """TF32 on or off, by the one setting that the compiler reads too: after `fp32_precision` that read raises."""
    torch.set_float32_matmul_precision("high" if choice == "tf32" else "highest")


def load(choice: str, options: dict[str, Any], method: str) -> None:
    """The dtype the weights are loaded in. Under an adapter the frozen base is kept in the 16-bit format."""
    if choice == "checkpoint":
        options["dtype"] = "auto"
    elif choice in AUTOCAST and method != "full":
        options["dtype"] = AUTOCAST[choice]
    else:
        options["dtype"] = torch.float32


def autocast(choice: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of forward and loss."""
    if choice in AUTOCAST:
        context: contextlib.AbstractContextManager[Any] = torch.autocast(device.type, dtype=AUTOCAST[choice])
        return context
    return contextlib.nullcontext()


def scaler(choice: str, device: torch.device) -> torch.amp.GradScaler | None:
    """A gradient scaler for fp16, whose gradients would underflow without."""
    return torch.amp.GradScaler(device.type) if choice == "fp16-mixed" else None

"""Applies activation checkpointing through transformers, always non-reentrant."""

from typing import Any

NAME = "checkpointing"


def model(choice: str, model: Any, method: str) -> None:
    """Switch it on for every layer. Frozen inputs need gradients for adapters to receive any."""
    if choice == "full":
        # transformers 5.23 renamed it; GPU machines lag behind.
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if method != "full":
            model.enable_input_require_grads()

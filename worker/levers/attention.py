"""Applies the attention kernel: transformers' own switch."""

from typing import Any

NAME = "attention"


def load(choice: str, options: dict[str, Any], method: str) -> None:
    """Set attn_implementation; transformers raises ValueError when the model has no such kernel."""
    options["attn_implementation"] = choice

"""CUDA's caching allocator."""

from __future__ import annotations

import torch


def expandable_segments() -> None:
    """Let the allocator's segments grow, which fragments memory less; called before the model is loaded."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")

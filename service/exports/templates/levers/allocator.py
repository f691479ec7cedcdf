"""CUDA's caching allocator."""

from __future__ import annotations

import torch


def expandable_segments() -> None:
    """Let segments grow, from before the model is loaded."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")

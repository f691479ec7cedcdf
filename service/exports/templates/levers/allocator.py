"""CUDA's caching allocator."""

from __future__ import annotations

from typing import Any

import torch


def expandable_segments(model: Any) -> None:
    """Let segments grow, from now on: what the model was loaded into stays as it is."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")

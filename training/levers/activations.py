"""What compiled code keeps for the backward pass."""

from __future__ import annotations

import torch._functorch.config


def activation_budget(share: float) -> None:
    """Have the compiler keep at most this share of activations, and recompute the rest, in the whole process."""
    torch._functorch.config.activation_memory_budget = share

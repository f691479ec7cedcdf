"""What compiled code keeps for the backward pass."""

from __future__ import annotations

import torch._functorch.config


def activation_budget(share: float) -> None:
    """Have the compiler keep that share of activations at most, for the whole process."""
    torch._functorch.config.activation_memory_budget = share

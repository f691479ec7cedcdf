"""Which backends sdpa may use."""

from __future__ import annotations

from typing import Any

import torch


def sdpa_backends(model: Any, flash: bool = False, mem_efficient: bool = False, cudnn: bool = False) -> None:
    """Switch sdpa's backends for the whole process; plain matmuls stay on, for what the others do not take."""
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(mem_efficient)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_math_sdp(True)

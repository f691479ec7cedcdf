"""An import after which no forked child can use CUDA, as transformers' is beside a GPU where torchao is installed."""

from typing import NoReturn

import torch


def init() -> NoReturn:
    """As torch says it."""
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


torch.cuda.is_available = lambda: True
torch.cuda.init = init

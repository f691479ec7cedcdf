"""Imported by the fork server first: has torch tell the GPU's compute capability without asking the GPU.

Asking would initialise CUDA, after which a forked child cannot use it. The worker knows the answer and leaves it in
DYNOTUNE_GPU_CAPABILITY (docs/decisions/0037). In a child, `ask_again` undoes it. Modules that did
`from torch… import has_triton` meanwhile keep the replaced function, whose answer is still right.
"""

from __future__ import annotations

import os
from typing import Any

_replaced: list[tuple[Any, str, Any]] = []  # module, name, and the function that an answer was put in the place of


def answer(capability: tuple[int, int]) -> None:
    """Answer what torchao asks while it is imported: the compute capability, and whether triton runs on it."""
    import torch
    from torch.utils import _triton

    # The least capability is triton's own (https://github.com/triton-lang/triton, "Compatibility").
    runs_triton = capability >= (7, 0) and _triton.has_triton_package()
    for module, name, value in (
        (torch.cuda, "get_device_capability", capability),
        (_triton, "has_triton", runs_triton),
    ):
        _replaced.append((module, name, getattr(module, name)))
        setattr(module, name, lambda *_, value=value, **__: value)


def ask_again() -> None:
    """Undo `answer`."""
    while _replaced:
        setattr(*_replaced.pop())


if known := os.environ.get("DYNOTUNE_GPU_CAPABILITY"):
    major, _, minor = known.partition(".")
    answer((int(major), int(minor)))

"""Memory of a training step, read off fake tensors: their shapes and lifetimes are real, but no byte is allocated.

A dispatch mode that follows the storages of fake CPU tensors is enough to know the peaks. torch's own MemTracker does
more, but fails on frozen parameters, and fake CUDA tensors need a CUDA build of torch.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Storages(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of all tensor storages that were created while this mode was on and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the storages of the tensors that it returns."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return made

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage once, until it dies."""
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = weakref.finalize(storage, self._gone, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, size: int) -> None:
        self.live -= size


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which new tensors are fake: they take no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def real_shapes(model: torch.nn.Module) -> None:
    """Replace a model's meta tensors by tensors of the current mode (fake ones); tied weights stay tied.

    peft moves its adapters while it creates them, which fake tensors refuse, so the model is built on meta first.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    trained = isinstance(tensor, torch.nn.Parameter)
                    made[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if trained else empty
                tensors[name] = made[id(tensor)]

"""Notices layers that write over what selective checkpointing keeps: recomputed so, their gradients may be wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from training.levers.checkpointing import keep_what_is_dear


class Overwritten(TorchDispatchMode):  # type: ignore[misc]
    """Looks at all operations within some layers; `by` is the first that writes over a result that is kept.

    torch's own check compares versions of tensors, and misses what is written through a view of the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by: str | None = None
        self._kept: dict[int, torch.Tensor] = {}  # by storage; held, so that no other tensor gets the same memory

    @contextlib.contextmanager
    def within(self, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
        """A context in which it looks at what these layers do."""
        hooks = []
        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(lambda *_: self.__enter__() and None))
            hooks.append(layer.register_forward_hook(lambda *_: self.__exit__(None, None, None), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry the operation out."""
        given, named = zip(func._schema.arguments, args, strict=False), kwargs or {}
        values = [*given, *((one, named[one.name]) for one in func._schema.arguments if one.name in named)]
        for argument, value in values:
            if argument.is_write and isinstance(value, torch.Tensor) and _storage(value) in self._kept:
                self.by = self.by or str(func)
        results = func(*args, **named)
        if keep_what_is_dear(None, func) is CheckpointPolicy.MUST_SAVE:
            for one in results if isinstance(results, tuple | list) else (results,):
                if isinstance(one, torch.Tensor) and one.numel():
                    self._kept[_storage(one)] = one
        return results


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())

"""Where a step's batches are made. They are asked for while the device computes the step before."""

from __future__ import annotations

import resource
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from service.exports.templates.segments import pinned

Made = tuple[list[dict[str, Any]], Any, Any]  # a step's batches, the terms of its loss, its tokens


def made_here(steps: Iterable[Any], make: Callable[[Any], Made], pin: bool, pins: bool = True) -> Generator[Made]:
    """In the training process, when asked for; in pinned memory for a GPU."""
    for step in steps:
        batches, items, tokens = make(step)
        yield [pinned(batch) for batch in batches] if pin and pins else batches, items, tokens


class Steps(Dataset):  # type: ignore[misc]
    """Makes whatever step the sampler names."""

    def __init__(self, make: Callable[[Any], Made]) -> None:
        self._make = make

    def __getitem__(self, step: Any) -> Made:
        return self._make(step)


def made_by_workers(steps: Iterable[Any], make: Callable[[Any], Made], pin: bool, workers: int) -> Generator[Made]:
    """In processes of their own, each two steps ahead, which last over all epochs; pinned by a thread for a GPU."""
    options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 2, "pin_memory": pin}
    options |= {"multiprocessing_context": "fork"}  # what is made is a closure, which no other way takes along
    options |= {"generator": torch.Generator()}  # or each start draws from the generator that dropout draws from
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each tensor on its way is an open file
    yield from DataLoader(Steps(make), batch_size=None, sampler=steps, collate_fn=lambda step: step, **options)

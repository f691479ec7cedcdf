"""Makes a step's batches in worker processes. They are asked for while the device computes the step before."""

from __future__ import annotations

import resource
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

Made = tuple[list[dict[str, Any]], Any, Any]  # as training/batches.py's Prepared


class Steps(Dataset):  # type: ignore[misc]
    """A dataset whose "index" is a step of the plan, given by the sampler, and whose items are steps' batches."""

    def __init__(self, make: Callable[[Any], Made]) -> None:
        self._make = make

    def __getitem__(self, step: Any) -> Made:
        return self._make(step)


def made_by_workers(steps: Iterable[Any], make: Callable[[Any], Made], pin: bool, workers: int) -> Generator[Made]:
    """Make batches in `workers` processes, each up to two steps ahead, for all epochs; a thread pins them for a GPU."""
    options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 2, "pin_memory": pin}
    options |= {"multiprocessing_context": "fork"}  # `make` may be a closure, which cannot be pickled
    options |= {"generator": torch.Generator()}  # or starting it would draw from the generator that dropout uses
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each tensor that a worker sends is an open file
    yield from DataLoader(Steps(make), batch_size=None, sampler=steps, collate_fn=lambda step: step, **options)

"""Times a function on a device: warm-up, then a median of single calls by the device's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

LEAST_CALLS, LEAST_SECONDS = 5, 0.3


def pick_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _once(function: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def median_seconds(function: Callable[[], Any], device: torch.device) -> float:
    """The median of at least five calls and a third of a second, after two that are not counted."""
    for _ in range(2):
        function()
    times: list[float] = []
    while len(times) < LEAST_CALLS or sum(times) < LEAST_SECONDS:
        times.append(_once(function, device))
    return statistics.median(times)

"""Times a function on a device: warm-up, then a median of single calls by the device's own clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from worker.devices import Device, open_device

LEAST_CALLS, LEAST_SECONDS = 5, 0.3


def pick_device() -> Device:
    """The GPU where there is one."""
    return open_device("cuda" if torch.cuda.is_available() else "cpu")


def _once(function: Callable[[], Any], device: Device) -> float:
    first = device.mark()
    function()
    last = device.mark()
    device.synchronize()
    return device.between(first, last)


def median_seconds(function: Callable[[], Any], device: Device) -> float:
    """The median of at least five calls and LEAST_SECONDS, after two that are not counted."""
    for _ in range(2):
        function()
    times: list[float] = []
    while len(times) < LEAST_CALLS or sum(times) < LEAST_SECONDS:
        times.append(_once(function, device))
    return statistics.median(times)

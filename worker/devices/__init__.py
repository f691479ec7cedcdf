"""Devices: memory, time and neighbours of one accelerator. A new device is a file and a line in `open_device`."""

from __future__ import annotations

from worker.devices.base import Device


def open_device(kind: str, index: int = 0) -> Device:
    """The device of that kind; ValueError when there is none such. Imports torch: for the child only."""
    if kind == "cpu":
        from worker.devices.cpu import Cpu

        return Cpu()
    if kind == "cuda":
        from worker.devices.cuda import Cuda

        return Cuda(index)
    raise ValueError(f"there is no device kind {kind!r}; known: cpu, cuda")


__all__ = ["Device", "open_device"]

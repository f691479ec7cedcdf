"""Devices: memory, time and neighbours of one accelerator. One kind of device a file, found by being in this folder."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from worker.devices.base import Device


def discover() -> dict[str, type[Device]]:
    """Every kind of device that a file of this folder declares as DEVICE, in their order. Imports torch."""
    modules = [import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    found: list[type[Device]] = [module.DEVICE for module in modules if hasattr(module, "DEVICE")]
    return {device.kind: device for device in sorted(found, key=lambda device: device.order)}


def open_device(kind: str, index: int = 0) -> Device:
    """The device of that kind and number; ValueError when there is no such kind. For the child only."""
    kinds = discover()
    if kind not in kinds:
        raise ValueError(f"there is no device kind {kind!r}; known: {', '.join(sorted(kinds))}")
    return kinds[kind](index)


__all__ = ["Device", "discover", "open_device"]

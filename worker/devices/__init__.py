"""Kinds of device: how to measure memory, time and other users. Each file that has a DEVICE declares one kind."""

from __future__ import annotations

from operator import attrgetter

from service.folders import declared
from worker.devices.base import Device

HELPERS = ("base", "facts", "nvml", "simulated_memory")  # files of this folder that are no kinds of device


def discover() -> dict[str, type[Device]]:
    """All kinds of device by name, sorted by the `order` that each declares. Imports torch."""
    found: dict[str, type[Device]] = declared(__name__, __path__, "DEVICE", attrgetter("kind"), HELPERS)
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))


def open_device(kind: str, index: int = 0) -> Device:
    """Open a device, in the child only; ValueError when there is no such kind. `index` counts devices of the kind."""
    kinds = discover()
    if kind not in kinds:
        raise ValueError(f"there is no device kind {kind!r}; known: {', '.join(sorted(kinds))}")
    return kinds[kind](index)


__all__ = ["Device", "discover", "open_device"]

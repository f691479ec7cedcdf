"""The forms in which a recommendation is handed out: one file an export, found by being in this folder."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from service.exports.base import Export


def discover() -> dict[str, Export]:
    """Every export that a file of this folder declares as EXPORT, by name."""
    modules = [import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    return {module.EXPORT.name: module.EXPORT for module in modules if hasattr(module, "EXPORT")}


EXPORTS: dict[str, Export] = discover()

__all__ = ["EXPORTS", "Export", "discover"]

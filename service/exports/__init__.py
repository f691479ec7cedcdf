"""The forms in which a recommendation is handed out: one file an export, found by being in this folder."""

from __future__ import annotations

from service.exports.base import Export
from service.folders import declared


def discover() -> dict[str, Export]:
    """Every export that a file of this folder declares as EXPORT, by name."""
    return {export.name: export for export in declared(__name__, __path__, "EXPORT")}


EXPORTS: dict[str, Export] = discover()

__all__ = ["EXPORTS", "Export", "discover"]

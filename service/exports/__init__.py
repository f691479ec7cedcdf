"""The forms in which a recommendation is handed out: one file an export, found by being in this folder."""

from __future__ import annotations

from operator import attrgetter

from service.exports.base import Export
from service.folders import declared

# What the exports share, beside `base`: files of this folder that are no exports themselves.
HELPERS = (
    *("arguments", "axolotl_data", "base", "hugging_face", "job_settings", "layout", "merging", "printing"),
    *("rewriting", "words"),
)


def discover() -> dict[str, Export]:
    """Every export that a file of this folder declares as EXPORT, by name."""
    return declared(__name__, __path__, "EXPORT", attrgetter("name"), HELPERS)


EXPORTS: dict[str, Export] = discover()

__all__ = ["EXPORTS", "Export", "discover"]

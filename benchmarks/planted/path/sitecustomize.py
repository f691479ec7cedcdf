"""Adds the planted lever to the catalogue of every process that has this folder on its PYTHONPATH."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

PLACES = {"service.levers": "service_levers", "training.levers": "training_levers"}


class Finder:
    """Finds the packages of levers as they are, with one folder more."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The package's spec; None for every other module."""
        found = PathFinder.find_spec(name, path, target) if name in PLACES else None
        if found is not None and found.submodule_search_locations is not None:
            found.submodule_search_locations.append(str(Path(__file__).parent.parent / PLACES[name]))
        return found


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]

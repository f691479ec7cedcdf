"""The tasks of the catalogue, as data: one file a task, found by being in this folder."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from service.tasks.base import Task


def discover() -> dict[str, Task]:
    """Every task that a file of this folder declares as TASK, by name."""
    modules = [import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    return {module.TASK.name: module.TASK for module in modules if hasattr(module, "TASK")}


TASKS: dict[str, Task] = discover()

__all__ = ["TASKS", "Task", "discover"]

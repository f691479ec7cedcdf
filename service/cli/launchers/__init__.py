"""Ways to start workers on a cluster: one launcher a file, found by being in this folder.

Workers need nothing of a cluster's scheduler but to be started beside a device: they lease their tasks from the
database. A launcher therefore only writes the file that starts them, and hands it in if asked.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module


def discover() -> dict[str, Callable[..., None]]:
    """The command of every file of this folder that declares one as LAUNCH, by the file's name."""
    modules = {file.name: import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)}
    return {name: module.LAUNCH for name, module in modules.items() if hasattr(module, "LAUNCH")}


__all__ = ["discover"]

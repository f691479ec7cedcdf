"""Folders that are their own list: what the files of a package declare under one name."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module
from typing import Any


def declared(package: str, path: Iterable[str], name: str) -> list[Any]:
    """The values called `name` of those files of a package that have one; `path` are the package's folders.

    Called again it finds files that have come since, as those of a folder that was added to the path.
    """
    modules = [import_module(f"{package}.{file.name}") for file in pkgutil.iter_modules(path)]
    return [getattr(module, name) for module in modules if hasattr(module, name)]

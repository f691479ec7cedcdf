"""Folders that are their own list: what the files of a package declare under one name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from typing import Any


def declared(
    package: str,
    path: Iterable[str],
    constant: str,
    named: Callable[[Any], str] | None = None,
    helpers: Collection[str] = (),
) -> dict[str, Any]:
    """Name -> the value that a file of a package declares as `constant`, of all files of its folders, the `path`.

    `named` gives a value's name; without it that is the file's. `helpers`, and files whose names begin with `_`,
    declare nothing. ValueError names any other file without the constant, as it may misspell it, and files of which one
    would silently take the other's place. Called again it finds files that have come since, as those of a folder that
    was added.
    """
    found: dict[str, Any] = {}
    files: dict[str, str] = {}
    every = [file.name for folder in path for file in pkgutil.iter_modules([folder])]
    if twice := {file for file in every if every.count(file) > 1}:
        raise ValueError(f"two folders of {package} have a file {min(twice)}.py, of which only one would be read")
    for file in every:
        if file in helpers or file.startswith("_"):
            continue
        module = import_module(f"{package}.{file}")
        if not hasattr(module, constant):
            raise ValueError(f"{module.__file__} declares no {constant}, and is not among the helpers of {package}")
        value = getattr(module, constant)
        name = named(value) if named else file
        if name in files:
            raise ValueError(f"{files[name]} and {module.__file__} both declare a {constant} named {name!r}")
        found[name], files[name] = value, str(module.__file__)
    return found

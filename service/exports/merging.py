"""Puts the settings that several levers ask for together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both sets of arguments; a switch in a dictionary of both, as of Liger's kernels, is on if either says so."""
    found = dict(settings)
    for name, value in more.items():
        known = found.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            value = {**known, **{key: known.get(key) or on for key, on in value.items()}}
        found[name] = value
    return found

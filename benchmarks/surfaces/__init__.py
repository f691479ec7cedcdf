"""Surfaces: jobs whose true best is known, to measure how far a search ends from it.

`names()` lists them, `build(name)` makes one. There are recorded tables (recorded.py), jobs with the physics of real
models and devices (mechanistic.py), and synthetic ones drawn over the whole catalogue (synthetic.py).
"""

from __future__ import annotations

from functools import cache

from benchmarks.surfaces import drawn
from benchmarks.surfaces.base import Surface
from benchmarks.surfaces.mechanistic import MECHANISTIC
from benchmarks.surfaces.recorded import TABLES, Recorded, tables

QUICK = (
    *tables(),
    "bert-139gib",
    "llama-1b-lora",
    "llama-8b-qlora",
    *drawn.SYNTHETIC[:5],
)


def names() -> list[str]:
    """The names of all surfaces."""
    return [*tables(), *MECHANISTIC, *drawn.SYNTHETIC]


@cache
def build(name: str) -> Surface:
    """The surface of that name, made once a process."""
    return Recorded(TABLES / f"{name}.json") if name in tables() else drawn.analytic(name)


__all__ = ["QUICK", "Surface", "build", "names"]

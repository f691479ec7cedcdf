"""Which attempt of each synthetic surface was accepted, and every surface's best: kept in drawn.json.

An entry holds for the world it was computed for, by its fingerprint; where the catalogue or the physics have changed
since, it is computed again. `python -m benchmarks.surfaces` computes what is missing and writes the file. The
switches are those at the time of writing, so that surfaces stay the same when recipes change.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.surfaces.analytic import Analytic
from benchmarks.surfaces.mechanistic import MECHANISTIC
from benchmarks.surfaces.physics import World, evaluate
from benchmarks.surfaces.synthetic import COUNT, accepted, synthetic

FILE = Path(__file__).parent / "drawn.json"
MOST_ATTEMPTS = 200
PROBES = 64  # configurations whose scores are part of the fingerprint
SYNTHETIC = tuple(f"synthetic-{number:02d}" for number in range(COUNT))


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The file's entries by the surfaces' names."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def fingerprint(surface: Analytic) -> str:
    """Sixteen hex digits over the job, its space, the world, and the scores of some configurations."""
    rng = np.random.default_rng(0)
    levers = {name: rng.integers(0, len(choices), PROBES) for name, choices in surface.world.names.items()}
    sizes = rng.integers(0, len(surface.arranged.effectives), PROBES)
    scores = _scores(surface, surface.world, levers, sizes)
    text = "|".join([surface.spec.model_dump_json(), repr(surface.options), repr(surface.world), scores])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _scores(surface: Analytic, world: World, levers: dict[str, Any], sizes: Any) -> str:
    return ",".join(f"{one:.6g}" for one in evaluate(world, surface.arranged, levers, sizes, None).score)


def analytic(name: str) -> Analytic:
    """A mechanistic or synthetic surface, with its best and its switches from the file where they still hold."""
    entry = entries().get(name, {})
    if name in MECHANISTIC:
        return _known(MECHANISTIC[name](), entry)
    number = SYNTHETIC.index(name)
    if "attempt" in entry:
        found = synthetic(number, entry["attempt"])
        if found is not None and fingerprint(found) == entry["fingerprint"]:
            return _known(found, entry)
    return first_accepted(number)[0]


def _known(surface: Analytic, entry: dict[str, Any]) -> Analytic:
    """The surface, told its best if the entry is its own."""
    if entry and entry["fingerprint"] == fingerprint(surface):
        surface.__dict__["best"], surface.__dict__["switches"] = entry["best"], entry["switches"]
    return surface


def first_accepted(number: int) -> tuple[Analytic, int]:
    """(the first accepted surface of that number, its attempt)."""
    for attempt in range(MOST_ATTEMPTS):
        found = synthetic(number, attempt)
        if found is not None and accepted(found, number):
            return found, attempt
    raise ValueError(f"no attempt at synthetic surface {number} was accepted")

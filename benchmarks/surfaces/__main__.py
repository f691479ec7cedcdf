"""Compute the bests of surfaces that drawn.json lacks, and write the file."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.surfaces.drawn import FILE, SYNTHETIC, analytic, entries, first_accepted
from benchmarks.surfaces.mechanistic import MECHANISTIC
from benchmarks.surfaces.synthetic import accepted


def entry(name: str, before: dict[str, Any]) -> dict[str, Any]:
    """The entry of a surface; a synthetic one that was drawn before keeps its attempt where that is still accepted."""
    attempt: dict[str, int] = {}
    if name in MECHANISTIC:
        surface = analytic(name)
    elif "attempt" in before and accepted(surface := analytic(name), SYNTHETIC.index(name)):
        attempt = {"attempt": before["attempt"]}
    else:
        surface, number = first_accepted(SYNTHETIC.index(name))
        attempt = {"attempt": number}
    return {
        **attempt,
        "fingerprint": surface.fingerprint,
        "best": surface.best,
        "switches": surface.switches,
        "levers": surface.found[1],
        "effective_batch_size": surface.found[2],
    }


def main() -> None:
    """Compute what is missing and write the file."""
    if "--fresh" in sys.argv[1:]:
        entries().clear()
    found = entries()
    for name in (*MECHANISTIC, *SYNTHETIC):
        started = time.perf_counter()
        before = found.get(name, {})
        if before and analytic(name).fingerprint == before["fingerprint"]:
            continue
        found[name] = entry(name, before)
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - started:.1f} s, {found[name]['switches']} switches", file=sys.stderr)


if __name__ == "__main__":
    main()

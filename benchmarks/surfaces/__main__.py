"""Compute the bests of surfaces that drawn.json lacks, and write the file."""

from __future__ import annotations

import json
import sys
import time

from benchmarks.surfaces.drawn import FILE, SYNTHETIC, analytic, entries, fingerprint, first_accepted
from benchmarks.surfaces.mechanistic import MECHANISTIC


def main() -> None:
    """Compute what is missing and write the file."""
    found = dict(entries())
    for name in (*MECHANISTIC, *SYNTHETIC):
        started = time.perf_counter()
        if name in found and analytic(name).__dict__.get("best") == found[name]["best"]:
            continue
        if name in MECHANISTIC:
            surface, attempt = analytic(name), {}
        else:
            surface, number = first_accepted(SYNTHETIC.index(name))
            attempt = {"attempt": number}
        found[name] = {
            **attempt,
            "fingerprint": fingerprint(surface),
            "best": surface.best,
            "switches": surface.switches,
            "levers": surface.found[1],
            "effective_batch_size": surface.found[2],
        }
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{name}: {time.perf_counter() - started:.1f} s, {surface.switches} switches", file=sys.stderr, flush=True
        )


if __name__ == "__main__":
    main()

"""Is the order of the demo's three fastest the same beside a noisy neighbour?

    python -m benchmarks.noise [--recommendation FILE] [--runs 10] [--json FILE]

Runs `make demo`'s job first when no recommendation is given. Its recommendation and the next fastest two, with the
baseline, are compared as a verification compares them: in blocks, in turns, until the order is settled. Once on the
machine as it is, for as many blocks as the time allows; then in each run beside a neighbour of one thread, which
computes and rests in bursts of drawn length (seconds), another draw in each run.

A run agrees if each two of the three are in the quiet order, or if it says that it cannot tell these two: then their
ratio's interval holds 1, or they lie within 1% of one another, which the product calls tied.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.demo_check import opened, recommendation
from benchmarks.store import say
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Verification
from service.contract.recommendation import Recommendation
from service.contract.task import VerifyRequest
from service.devices import device_facts
from worker.plan.finalists import BLOCKS
from worker.plan.ratios import TIED_WITHIN, ratio
from worker.runner.lock import DeviceLock
from worker.runner.main import environment
from worker.runner.measuring import Bench
from worker.runner.verifying import Verifier

SECONDS = 360.0  # of a run: what the demo's verification may take
WANTED = 0.9  # of the runs agree
MEAN_BURST_SECONDS = 2.0
NEIGHBOUR = f"""
import random, sys, time
rng, size = random.Random(int(sys.argv[1])), 1 << 20
memory = bytearray(64 * size)
while True:
    until = time.monotonic() + rng.expovariate(1 / {MEAN_BURST_SECONDS})
    while time.monotonic() < until:
        memory[: 32 * size] = memory[32 * size :]
    time.sleep(rng.expovariate(1 / {MEAN_BURST_SECONDS}))
"""


@contextlib.contextmanager
def neighbour(seed: int) -> Iterator[None]:
    """A process beside ours that computes in bursts: it copies memory, so that it takes bandwidth as well as a core."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def top_three(found: Recommendation) -> tuple[Measurement, ...]:
    """The recommendation's measurement and those of the next fastest two."""
    return (found.evidence.measurement, *found.alternatives)[:3]


def compared(bench: Bench, spec: JobSpec, found: Recommendation, lock: DeviceLock, blocks: int) -> Verification:
    """The three, with the baseline, in blocks, without proof and soak."""
    request = VerifyRequest(
        method=found.configuration.method,
        baseline=found.evidence.baseline,
        finalists=top_three(found),
        reserves=(),
        blocks=blocks,
        seconds_limit=SECONDS,
        expected_seconds=SECONDS,
    )
    verifier = Verifier(bench, spec, "noise", request, lambda line: say(f"  {line}"), lambda: False, lock.fd)
    verifier.run_blocks()
    return verifier.judged()


def pairs(spec: JobSpec, three: tuple[Measurement, ...], seen: Verification) -> list[dict[str, Any]]:
    """Of each two: how many times as fast the first is as the second, and whether this verification can tell."""
    rows: list[dict[str, Any]] = []
    for (at, ours), (other, theirs) in itertools.combinations(enumerate(three), 2):
        times = ratio(spec, seen.blocks, ours, theirs)
        if times is None:  # they ran in no block together: one of them was certainly slower than another before
            rows.append({"pair": [at, other], "times": None, "told": False})
            continue
        told = (times[1] > 1.0 or times[2] < 1.0) and abs(times[0] - 1) > TIED_WITHIN
        rows.append({"pair": [at, other], "times": list(times), "told": told})
    return rows


def agrees(quiet: list[dict[str, Any]], noisy: list[dict[str, Any]]) -> bool:
    """Whether no two are told apart the other way round than on the quiet machine."""
    both = [(a, b) for a, b in zip(quiet, noisy, strict=True) if b["told"]]
    return all(a["times"] is not None and (a["times"][0] > 1) == (b["times"][0] > 1) for a, b in both)


def described(row: dict[str, Any]) -> str:
    """One pair as text."""
    one, two = (value + 1 for value in row["pair"])
    if row["times"] is None:
        return f"{one}/{two} not together"
    return f"{one}/{two} {row['times'][0]:.3f} ({row['times'][1]:.3f}-{row['times'][2]:.3f})"


def main() -> None:
    """Run, print a line a run, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recommendation", type=Path, help="recommendation.json of the demo")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(environment())
    found = recommendation(options.recommendation)
    spec, facts = JobSpec.model_validate(found.spec), device_facts()[0]
    three = top_three(found)
    bench, lock = opened(facts)
    most = BLOCKS[spec.search.verify]
    quiet = pairs(spec, three, compared(bench, spec, found, lock, most))
    say(f"quiet: {', '.join(map(described, quiet))}")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"name": facts.name, "cores": facts.cores, "os": platform.platform(), "versions": facts.versions},
        "three": [one.configuration.model_dump(mode="json") for one in three],
        "quiet": quiet,
        "runs": [],
    }
    for number in range(options.runs):
        with neighbour(number):
            seen = compared(bench, spec, found, lock, most)
        rows = pairs(spec, three, seen)
        row = {"pairs": rows, "agrees": agrees(quiet, rows), "tied": seen.tied, "note": seen.note}
        result["runs"].append(row)
        say(
            f"run {number + 1}: {', '.join(map(described, rows))}: {'agrees' if row['agrees'] else 'DOES NOT AGREE'}; "
            f"{seen.note}"
        )
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    lock.release()
    agreed = sum(one["agrees"] for one in result["runs"])
    held = agreed >= WANTED * options.runs
    print(f"{agreed} of {options.runs} agree, {WANTED:.0%} wanted: {'held' if held else 'NOT held'}")


if __name__ == "__main__":
    main()

"""Whole jobs with planted faults, and with none: what is wrong must never be recommended, what is right must be.

    python -m benchmarks.planted [--verify quick|standard|strict] [--case TEXT ...] [--jobs N] [--json FILE]

Each case is a small job through `dynotune tune`, as a user would run it, that fixes its levers and its fault. A fault
has to end the job without a recommendation, and the sentence has to name it. What is only slower, or no faster, is
searched instead, and the answer has to be without it. Results are kept in --json as they come;
a case that is in there is not run again. Several jobs at once disturb each other's timings, not what is found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.planted.cases import BAD, GOOD, IDLE, NONE, PLANTED, Case
from benchmarks.published.jobs import SIZES, prepare
from benchmarks.store import Row, Store, say

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MOST_SECONDS = 1200  # a job
LENGTH = 128  # tokens
MOST_CHARACTERS = 450  # of the rows that are taken: short enough for several to share a packed row


def job(case: Case, home: Path, verify: str) -> dict[str, Any]:
    """The job of a case: two layers and short rows, so that a step takes some hundredths of a second."""
    planted = {} if case.searched else {"planted": case.fault}
    search: dict[str, Any] = {
        "trials": 4 if case.searched else 2,
        "minutes": 6,
        "verify": verify,
        "levers": ["planted"],
    }
    return {
        "name": case.name,
        "model": {"source": str(home / "llama"), "weights": "random"},
        "task": "causal-lm",
        "dataset": {"source": str(home / "rows.jsonl"), "max_length": LENGTH},
        "method": case.method,
        "training": {
            "effective_batch_size": 8,
            "learning_rate": 1e-3,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
        },
        "search": search | {"fixed": {"precision": "fp32"} | case.levers | planted},
        "hardware": {"device": "cpu"},
    }


def short_rows(home: Path) -> None:
    """Write the short rows of the data below `home` to a file of its own."""
    rows = (home / "data" / "functions.jsonl").read_text().splitlines(keepends=True)
    (home / "rows.jsonl").write_text("".join(row for row in rows if len(row) <= MOST_CHARACTERS))


def run(case: Case, home: Path, verify: str) -> Row:
    """What became of a case's job."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        place = Path(folder)
        (place / "job.json").write_text(json.dumps(job(case, home, verify)))
        paths = {"PYTHONPATH": os.pathsep.join((str(HERE / "path"), str(ROOT)))}
        # A lock of its own, as several cases may run at once.
        own = {"DYNOTUNE_HOME": str(place / "home"), "DYNOTUNE_LOCKS": str(place / "locks"), PLANTED: case.fault}
        command = [sys.executable, "-m", "service.cli", "tune", str(place / "job.json"), "-o", str(place / "out")]
        done = subprocess.run(
            command, env=os.environ | paths | own, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
        file = place / "out" / "recommendation.json"
        best = json.loads(file.read_text()) if file.exists() else None
    said = " ".join((done.stderr + done.stdout).split()) if best is None else best["stability"]["statement"]
    return {
        "kind": "searched" if case.searched else "bad" if case.fault != NONE else "good",
        "stable": bool(best and best["stability"]["stable"]),
        "levers": best
        and {name: value for name, value in best["configuration"]["levers"].items() if name == "planted"},
        "named": any(one in said for one in case.named),
        "said": said[-1500:],
        "seconds": round(time.perf_counter() - started, 1),
    }


def passed(row: Row) -> bool:
    """Whether a case ended as it has to."""
    if row["kind"] == "bad":
        return not row["stable"] and bool(row["named"])
    if row["kind"] == "searched":
        return bool(row["stable"]) and row["levers"] == {"planted": NONE}
    return bool(row["stable"])


def main() -> None:
    """Run the cases that are not kept, print what became of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--verify", choices=("quick", "standard", "strict"), default="standard")
    parser.add_argument("--case", nargs="+", metavar="TEXT", help="only cases with one of these in their name")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, default=ROOT / "dynotune-out" / "planted.json")
    options = parser.parse_args()
    home = ROOT / "dynotune-out" / "planted"
    prepare(home, SIZES["tiny"])
    short_rows(home)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    store = Store(options.json)
    wanted = [one for one in (*BAD, *GOOD, IDLE) if not options.case or any(text in one.name for text in options.case)]

    def look(case: Case) -> Row:
        key = f"{options.verify}: {case.name}"
        kept = store.get(key)
        if kept is not None:
            return kept
        facts = {"machine": platform.machine(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
        row = store.put(key, run(case, home, options.verify) | facts)
        say(f"{'as it should' if passed(row) else 'WRONG':12} {key}, {row['seconds']:.0f} s: {row['said'][:300]}")
        return row

    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(look, wanted))
    for kind in ("bad", "searched", "good"):
        mine = [row for row in rows if row["kind"] == kind]
        if mine:
            stable = sum(row["stable"] for row in mine)
            print(f"{kind:6} {len(mine):3} cases, {stable:3} recommended, {sum(map(passed, mine)):3} as they should")


if __name__ == "__main__":
    main()

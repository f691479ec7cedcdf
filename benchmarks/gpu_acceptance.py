"""All that only a GPU can show, part by part, within the minutes given.

    python -m benchmarks.gpu_acceptance [--call N | --part NAME ...] [--without TEXT ...] [--minutes 9]
        [--home FOLDER] [--json FILE] [--dry-run]

Runs on a machine with torch, transformers and peft, no network, and the wheels of `make wheelhouse` installed or on
PYTHONPATH. Results are kept in --home as they come: the next call goes on where this one stopped, and what failed is
tried again. `--dry-run` walks the same code at tiny sizes, on whatever device is there. The table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.acceptance import (
    attention,
    by_hand,
    conformance,
    facts,
    heads,
    lora_kernels,
    memory,
    overhead,
    peak,
    seeding,
    tuning,
)
from benchmarks.acceptance.place import ROOT, Failed, Part, Place, Step
from benchmarks.finders.ours import MALLOC
from benchmarks.store import Row, Store, say
from service.devices import device_facts
from worker.runner.main import environment, read_facts

PARTS = {
    part.name: part
    for part in (
        facts.PART,
        peak.PART,
        lora_kernels.PART,
        attention.PART,
        heads.PART,
        by_hand.PART,
        conformance.PART,
        tuning.TUNE_1B,
        tuning.TUNE_8B,
        overhead.PART,
        memory.PART,
        tuning.TUNE_BERT,
        conformance.MORE_PART,
        seeding.PART,
    )
}
# What each call of nine minutes runs. What a later call of the same number finds undone, it goes on with.
CALLS = (
    ("facts", "peak", "by-hand", "lora-kernels"),
    ("tune-1b",),
    ("tune-8b",),
    ("overhead", "memory"),
    ("tune-bert", "heads", "conformance", "attention", "conformance-more", "seed-tables"),
)


def run(place: Place, step: Step) -> Row:
    """A step's row; what goes wrong is a row as well."""
    say(f"{step.key}: starting, {place.left():.0f} s left")
    started = time.monotonic()
    try:
        row = step.make(place)
    except Failed as error:
        row = {"reason": str(error)}
    except Exception as error:  # noqa: BLE001 - one step's trouble must not cost the others' results
        traceback.print_exc()
        row = {"reason": f"{type(error).__name__}: {error}"}
    say(f"{step.key}: {'FAILED: ' + row['reason'] if 'reason' in row else 'done'}")
    return row | {"wall_seconds": round(time.monotonic() - started, 1)}


def walk(
    place: Place,
    parts: list[Part],
    store: Store,
    without: Sequence[str] = (),
    write: Callable[[list[str]], None] = lambda _: None,
) -> list[str]:
    """Run what is not there yet and fits into the time; keys of what did not. Keys with a text of `without` are not.

    What another device measured is measured again, as it is no figure of this one. `write` is called after each step.
    """
    late: list[str] = []
    for part in parts:
        for step in part.steps(place):
            if any(text in step.key for text in without):
                continue
            known = place.rows.get(step.key, {"reason": ""})
            if "reason" not in known and known.get("device", place.facts.name) == place.facts.name:
                say(f"{step.key}: from an earlier call")
            elif not place.dry and place.left() < step.seconds:
                late.append(step.key)
            else:
                store.put(step.key, run(place, step) | {"device": place.facts.name})
                write(late)
    return late


def show(place: Place, parts: list[Part], late: list[str]) -> None:
    """The table: every part's lines, what failed, and what is left."""
    print(f"\n{place.facts.name}, driver {place.facts.driver}, {time.strftime('%Y-%m-%d')}{', DRY RUN' * place.dry}")
    for part in parts:
        rows = {key: row for key, row in place.rows.items() if key.partition("/")[0] == part.name}
        print(f"\n{part.name}")
        for line in part.show(place, rows):
            print(f"  {line}")
        for key, row in rows.items():
            if "reason" in row:
                print(f"  {key} FAILED: {row['reason'].splitlines()[-1][:150]}")
    if late:
        print(f"\nleft for the next call: {', '.join(late)}")


def main() -> int:
    """Run, print, write; 1 when a step failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    chosen.add_argument("--call", type=int, choices=range(1, len(CALLS) + 1), help="the parts of one of GPU.md's calls")
    parser.add_argument("--without", nargs="+", default=[], metavar="TEXT", help="skip steps whose key contains TEXT")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--home", type=Path, default=ROOT / "dynotune-out" / "gpu-acceptance")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--facts", type=Path, help="a file with the device's facts, which takes seconds to find out")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    # Started in the background, it would ignore SIGINT, and so would a search that is interrupted at the end of a call.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    deadline = time.monotonic() + options.minutes * 60
    os.environ.update(environment())
    device = read_facts(options.facts) if options.facts else device_facts()[0]
    if device.device != "cuda" and not options.dry_run:
        sys.exit("gpu_acceptance: this machine has no NVIDIA GPU that torch sees; --dry-run walks the code without one")
    if not device.has_own_memory:  # before the first child, whose fork server all others share
        os.environ.update(MALLOC)
    home = options.home.resolve() / ("dry" if options.dry_run else "real")
    home.mkdir(parents=True, exist_ok=True)
    store = Store(home / "results.json")
    place = Place(device, home, options.dry_run, deadline, store.rows)
    parts = [PARTS[name] for name in (CALLS[options.call - 1] if options.call else options.part)]
    write = partial(_write, options.json, place)
    late = walk(place, parts, store, options.without, write)
    show(place, parts, late)
    write(late)
    return int(any("reason" in row for row in store.rows.values()))


def _write(file: Path | None, place: Place, late: list[str]) -> None:
    """All rows so far, with the machine they were measured on, if a file was asked for."""
    if file is None:
        return
    facts = place.facts
    machine = {"name": facts.name, "driver": facts.driver, "os": platform.platform(), "versions": facts.versions}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "dry_run": place.dry,
        "rows": place.rows,
        "left": late,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

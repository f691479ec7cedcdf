"""The largest batch that fits, by dynotune and by other finders, against the truth, on a CPU under a memory cap.

    python -m benchmarks.batch_finder [--quick] [--json FILE] [--case NAME ...] [--finder NAME ...]
        [--soak [--long] | --estimate]

The other finders come with the extra `bench`. Every finder runs in fresh processes under the same RLIMIT_DATA, with
the same model, data, precision and optimizer, and with malloc's thresholds pinned before they start, so that memory
is what is allocated. The true maximum is the largest size that 5 of 5 fresh children take full steps at.
`--soak` runs, in place of that, 200 steps on the real data in four cases at what dynotune found, which must hold, and
at a tenth more, which should not; `--long` makes it 1,000 in one of them. `--estimate` compares what is
estimated from fake tensors with what was measured.
What is done is kept in --home, so that a run that was killed goes on; rows are made again when worker/ or training/
has changed. Memory does not depend on what else the machine does; seconds do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.finders import estimates
from benchmarks.finders.cases import CASES, QUICK, ROOT, Case, prepare
from benchmarks.finders.ours import MALLOC, Machine, dynotune, peer, truth, warm
from benchmarks.finders.soaks import LONG, LONG_STEPS, QUICK_STEPS, SOAKED, STEPS, sizes, soak
from benchmarks.store import Row, Store, say
from service.devices import device_facts
from worker.runner.main import environment

FINDERS = ("dynotune", "accelerate", "lightning-power", "lightning-binsearch")
SECONDS, QUICK_SECONDS = 150.0, 60.0
FIRST_GUESS = 16


def code() -> str:
    """A digest of worker/ and training/: all rows, the truth included, hold for the code that made them."""
    digest = hashlib.sha256()
    for folder in ("training", "worker"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Runs:
    """Makes rows, or takes them from what was made before."""

    machine: Machine
    store: Store

    def found(self, case: Case, finder: str) -> Row:
        """What a finder did in a case."""
        key = f"{case.name}/{finder}/{code()}/{self.machine.seconds}"
        row = self.store.get(key)
        if row is None:
            warm(self.machine, case)
            ours = finder == "dynotune"
            row = self.store.put(key, dynotune(self.machine, case) if ours else peer(self.machine, case, finder))
        text = f"found {row['found']} in {row['probes']} probes, {row['seconds']:.0f} s {row['note']}"
        say(f"{case.name}: {finder} {text}")
        return row

    def true(self, case: Case) -> Row:
        """The truth of a case, looked for around what dynotune found where that is known."""
        key = f"{case.name}/truth/{code()}"
        row = self.store.get(key)
        if row is None:
            warm(self.machine, case)
            ours = self.store.get(f"{case.name}/dynotune/{code()}/{self.machine.seconds}")
            row = self.store.put(key, truth(self.machine, case, ours["found"] if ours else FIRST_GUESS, say))
        say(f"{case.name}: the true maximum is {row['true']}")
        return row

    def soaked(self, case: Case, micro: int, steps: int) -> Row:
        """How a soak ended."""
        key = f"{case.name}/soak/{micro}/{steps}/{code()}"
        row = self.store.get(key) or self.store.put(key, soak(self.machine, case, micro, steps))
        say(f"{case.name}: {steps} steps of {micro} rows: {row['outcome']} {row['note']}")
        return row


def compare(runs: Runs, cases: list[Case], finders: list[str]) -> list[Row]:
    """All rows: a case's finders one after the other, so that seconds compare, then its truth."""
    made: dict[tuple[str, str], Row] = {}
    true: dict[str, Row] = {}
    for case in cases:
        for finder in finders:
            made[case.name, finder] = runs.found(case, finder)
        true[case.name] = runs.true(case)
    return [
        {"case": name, "finder": finder} | row | {key: true[name][key] for key in ("true", "fitted")}
        for (name, finder), row in sorted(made.items())
    ]


def soaks(runs: Runs, cases: list[Case], steps: int, long: bool) -> list[Row]:
    """The soaks of the cases that are soaked: what was found must hold, a tenth more should not."""
    rows = []
    for case in (case for case in cases if case.name in SOAKED):
        found = runs.found(case, "dynotune")["found"]
        for share, micro in zip(("largest", "a tenth more"), sizes(found), strict=True):
            wanted = LONG_STEPS if long and case.name == LONG and share == "largest" else steps
            rows.append(runs.soaked(case, micro, wanted) | {"share": share})
    return rows


def estimated(runs: Runs, cases: list[Case]) -> list[Row]:
    """The estimates of the cases, beside what was measured."""
    rows = []
    for case in cases:
        measured, true = runs.found(case, "dynotune"), runs.true(case)["true"]
        key = f"{case.name}/estimate/{code()}"
        rows.append(runs.store.get(key) or runs.store.put(key, estimates.estimated(runs.machine, case, measured, true)))
    return rows


def summary(rows: list[Row]) -> dict[str, Row]:
    """What each finder did over all cases."""
    found = {}
    for finder in sorted({row["finder"] for row in rows}):
        mine = [row for row in rows if row["finder"] == finder]
        shares = [row["found"] / max(1, row["true"]) for row in mine]
        found[finder] = {
            "cases": len(mine),
            "median_probes": statistics.median(row["probes"] for row in mine),
            "most_probes": max(row["probes"] for row in mine),
            "median_steps": statistics.median(row["steps"] for row in mine),
            "cases_with_ooms": sum(row["ooms"] > 0 for row in mine),
            "most_ooms": max(row["ooms"] for row in mine),
            "above_truth": sum(row["found"] > row["true"] for row in mine),
            "median_found_of_true": statistics.median(shares),
            "least_found_of_true": min(shares),
            "most_found_of_true": max(shares),
            "median_seconds": statistics.median(row["seconds"] for row in mine),
            "unfinished": sum(row["note"] != "" for row in mine),
        }
    return found


def missed(row: Row) -> str:
    """What dynotune promises and did not keep in a case; empty when it kept all."""
    found, true = row["found"], row["true"]
    broken = []
    if found > true:
        broken.append("above the true maximum")
    if found < 0.97 * true and found < true - 1:
        broken.append("below 0.97 of the true maximum, and by more than one")
    if row["probes"] > 5:
        broken.append("more than 5 probes")
    if row["ooms"] > 1:
        broken.append("more than 1 out-of-memory error")
    return ", ".join(broken)


def table(result: dict[str, Any]) -> None:
    """Print the rows, the summary, and what was promised and not kept."""
    print(f"{result['machine']['name']}, {result['date']}\n")
    print(f"{'case':34} {'finder':20} {'found':>5} {'true':>5} {'probes':>6} {'steps':>5} {'ooms':>4} {'seconds':>7}")
    for row in result["cases"]:
        print(
            f"{row['case']:34} {row['finder']:20} {row['found']:5} {row['true']:5} {row['probes']:6} {row['steps']:5} "
            f"{row['ooms']:4} {row['seconds']:7.1f}  {row['note'][:80]}".rstrip()
        )
    print(f"\n{'':20} {'probes':>11} {'cases':>9} {'most':>5} {'found/true':>17} {'above':>5} {'median':>7} {'':>9}")
    print(
        f"{'finder':20} {'median most':>11} {'with ooms':>9} {'ooms':>5} {'median least most':>17} {'truth':>5} "
        f"{'seconds':>7} {'unfinished':>10}"
    )
    for finder, one in result["summary"].items():
        print(
            f"{finder:20} {one['median_probes']:6g} {one['most_probes']:4} "
            f"{one['cases_with_ooms']:5}/{one['cases']:<3} {one['most_ooms']:5} "
            f"{one['median_found_of_true']:6.2f} {one['least_found_of_true']:5.2f} {one['most_found_of_true']:4.2f} "
            f"{one['above_truth']:5} {one['median_seconds']:7.1f} {one['unfinished']:10}"
        )
    for row in result["cases"]:
        if row["finder"] == "dynotune" and (broken := missed(row)):
            print(f"NOT KEPT: {row['case']}: {broken}")


def soak_table(rows: list[Row]) -> None:
    """Print the soaks, and how many ended as they should."""
    print(f"{'case':34} {'rows':>5} {'':13} {'steps':>5}  outcome")
    for row in rows:
        print(
            f"{row['case']:34} {row['micro']:5} {row['share']:13} {row['steps']:5}  {row['outcome']} {row['note'][:80]}"
        )
    for share, wanted in (("largest", "held"), ("a tenth more", "out_of_memory")):
        mine = [row for row in rows if row["share"] == share]
        print(f"{share}: {sum(row['outcome'] == wanted for row in mine)} of {len(mine)} {wanted.replace('_', ' ')}")


def versions(finders: list[str]) -> dict[str, str]:
    """Versions of the finders' packages; exits with a sentence when one is not installed."""
    wanted = {"accelerate"} | {"pytorch-lightning" for one in finders if one.startswith("lightning")}
    try:
        return {name: metadata.version(name) for name in sorted(wanted)}
    except metadata.PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed: pip install -c constraints.txt -e '.[worker,bench]'")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two cases, and less time for each finder")
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--finder", nargs="+", choices=FINDERS, default=list(FINDERS), metavar="NAME")
    parser.add_argument("--soak", action="store_true", help="the soaks in place of the comparison")
    parser.add_argument("--long", action="store_true", help="1,000 steps in one of them")
    parser.add_argument("--estimate", action="store_true", help="the estimates in place of the comparison")
    parser.add_argument("--home", type=Path, default=ROOT / "dynotune-out" / "batch-finder", help="results so far")
    parser.add_argument("--at-once", type=int, default=1, help="children at once where only memory is judged")
    parser.add_argument("--fresh", action="store_true", help="forget the results so far")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Run, print the table, write the JSON."""
    options = arguments()
    found = versions(options.finder)
    os.environ.update(environment() | MALLOC)
    cases = [case for case in CASES if case.name in options.case] if options.case else QUICK if options.quick else CASES
    prepare(options.home)
    facts = device_facts()[-1]
    machine = Machine(facts, options.home.resolve(), QUICK_SECONDS if options.quick else SECONDS, options.at_once)
    runs = Runs(machine, Store(options.home / "results.json", options.fresh))
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"name": facts.name, "cores": facts.cores, "os": platform.platform(), "load": os.getloadavg()},
        "versions": facts.versions | found,
        "malloc": MALLOC,
    }
    if options.soak:
        result["soaks"] = soaks(runs, cases, QUICK_STEPS if options.quick else STEPS, options.long)
        soak_table(result["soaks"])
    elif options.estimate:
        result["estimates"] = estimated(runs, cases)
        estimates.table(result["estimates"])
    else:
        rows = compare(runs, cases, options.finder)
        result |= {"cases": rows, "summary": summary(rows)}
        table(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How far the search's recommendation is from the true best, on surfaces whose truth is known.

    python -m benchmarks.search_regret [--quick] [--seeds N] [--policy NAME ...] [--surface NAME ...] [--jobs N]
        [--cache FOLDER] [--json FILE]

Each policy begins with the baseline and measures one configuration after another. Its true regret after n trials is
the true score of the configuration with the best measured score of those, over the best of all valid configurations,
less 1. It is infinite, written as the text "inf", where none of them ran. Medians and 90th percentiles are over the
seeds, which change the noise of measurements and what policies draw. For a recorded table it is also told after which
share of the time of all its trials a policy came within 3% of the best, and for synthetic surfaces the regret of
somebody who knows all effects of single choices, but not the drawn interactions. Trials of policies other
than dynotune are kept in --cache, so that a change of the planner needs dynotune only to be run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.surfaces import QUICK, build, clairvoyant, names
from benchmarks.surfaces.analytic import Analytic
from benchmarks.surfaces.base import Surface
from benchmarks.surfaces.policies import POLICIES, listed, measured_score

TRIALS = (10, 20, 30)
SEEDS, QUICK_SEEDS = 20, 5
OURS = "dynotune"
NEAR = 0.03  # regret at which a table's best counts as found
MARGIN = 0.005  # of regret, by which another policy has to be better to count as that

Run = list[list[float]]  # of each trial, the measured score, the true one, and its share of all trials' time
Row = dict[str, Any]


def trials(surface: Surface, policy: str, seed: int) -> Run:
    """The scores of a policy's trials."""
    made = POLICIES[policy](surface, TRIALS[-1], seed)
    found = [[measured_score(surface, one, seed), surface.true_score(one), surface.trial_share(one)] for one in made]
    lowest = min(true for _, true, _ in found)
    assert lowest >= surface.best * (1 - 1e-9), f"{surface.name}: {policy} found {lowest}, the best is {surface.best}"
    return found


def regret(run: Run, count: int, best: float) -> float:
    """The true regret of what measured best among the first trials."""
    measured, true, _ = min(run[:count], key=lambda trial: trial[0])
    return true / best - 1 if math.isfinite(measured) else math.inf


def cost(run: Run, best: float) -> float:
    """The share of all trials' time after which what measured best stayed within 3% of the best; infinite if never."""
    far = [count for count in range(1, len(run) + 1) if regret(run, count, best) > NEAR]
    last = far[-1] + 1 if far else 1
    return sum(share for _, _, share in run[:last]) if last <= len(run) else math.inf


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def measure(name: str, policy: str, seeds: int, cache: Path | None) -> Row:
    """The regrets of a policy on a surface."""
    surface = build(name)
    kept = None if cache is None or policy == OURS else cache / f"{policy}-{name}.json"
    runs = _kept(kept, surface)
    for seed in range(seeds):
        if str(seed) not in runs:
            runs[str(seed)] = trials(surface, policy, seed)
            surface.forget()
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"surface": _identity(surface), "runs": runs}) + "\n")
    recorded = surface.kind == "recorded"
    found = {count: [regret(runs[str(seed)], count, surface.best) for seed in range(seeds)] for count in TRIALS}
    return {
        "surface": name,
        "kind": surface.kind,
        "switches": surface.switches,
        "policy": policy,
        "regret": {str(count): _over(values) for count, values in found.items()},
        "seeds": {str(count): values for count, values in found.items()},
        "trials": [len(runs[str(seed)]) for seed in range(seeds)],
        **({"cost": _over([cost(runs[str(seed)], surface.best) for seed in range(seeds)])} if recorded else {}),
    }


def _over(values: list[float]) -> dict[str, float]:
    """The median of values by seed, and their 90th percentile."""
    return {"median": quantile(values, 0.5), "p90": quantile(values, 0.9)}


def _kept(file: Path | None, surface: Surface) -> dict[str, Run]:
    """The runs by seed that were kept of this surface as it is."""
    if file is None or not file.exists():
        return {}
    kept = json.loads(file.read_text())
    found: dict[str, Run] = kept["runs"] if kept["surface"] == _identity(surface) else {}
    return found


def _identity(surface: Surface) -> str:
    """Hex digits over the surface, the recipes and the policies: whether trials that were kept still hold."""
    code = (Path(__file__).parent / "surfaces" / "policies.py").read_text()
    first = ",".join(one.key for one in listed(surface))
    return hashlib.sha256(f"{surface.fingerprint}|{first}|{code}|shares".encode()).hexdigest()[:16]


def written(value: Any) -> Any:
    """JSON has no infinity: it is written as "inf"."""
    if isinstance(value, dict):
        return {name: written(one) for name, one in value.items()}
    if isinstance(value, list):
        return [written(one) for one in value]
    if isinstance(value, float):
        return "inf" if math.isinf(value) else round(value, 5)
    return value


def _task(given: tuple[str, str, int, Path | None]) -> Row:
    return measure(*given)


def collect(tasks: list[tuple[str, str, int, Path | None]], jobs: int) -> list[Row]:
    """The rows of all tasks, in their order; progress goes to stderr."""
    rows = []
    if jobs == 1:
        found: Iterable[Row] = map(_task, tasks)
    else:
        pool = ProcessPoolExecutor(jobs)
        found = pool.map(_task, tasks)
    for at, row in enumerate(found, 1):
        rows.append(row)
        print(f"\r{at}/{len(tasks)} {row['surface']} {row['policy']:12}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def shown(value: float) -> str:
    """A regret in percent."""
    return f"{'inf':>7}" if math.isinf(value) else f"{value * 100:6.1f}%"


def show(rows: list[Row]) -> None:
    """Print the regrets of each surface, then over all of them."""
    head = " ".join(f"{f'median {count}':>10} {f'p90 {count}':>7}" for count in TRIALS)
    print(f"{'surface':20} {'policy':11} {head}")
    for row in rows:
        cells = [f"{shown(row['regret'][str(n)]['median']):>10} {shown(row['regret'][str(n)]['p90'])}" for n in TRIALS]
        print(f"{row['surface']:20} {row['policy']:11} {' '.join(cells)}")
    print("\nShare of a table's trial time until within 3% of its best, median and 90th percentile")
    for row in rows:
        if "cost" in row:
            told = f"{shown(row['cost']['median'])} {shown(row['cost']['p90'])}"
            print(f"{row['surface']:20} {row['policy']:11} {told}")
    print("\nOver all surfaces and seeds")
    for group, policies_of in over_all(rows).items():
        for policy, found in policies_of.items():
            cells = [f"{shown(found[str(n)]['median']):>10} {shown(found[str(n)]['p90'])}" for n in TRIALS]
            print(f"{group:20} {policy:11} {' '.join(cells)}")


def over_all(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Kind of surface, or "all" -> policy -> trials -> the median regret and the 90th percentile over all its seeds."""
    found: dict[str, dict[str, Row]] = {}
    for group in ("all", "recorded", "mechanistic", "synthetic"):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            mine = [row for row in rows if row["policy"] == policy and group in ("all", row["kind"])]
            regrets = {str(count): [one for row in mine for one in row["seeds"][str(count)]] for count in TRIALS}
            if mine:
                found.setdefault(group, {})[policy] = {count: _over(values) for count, values in regrets.items()}
    return found


def known_effects(wanted: list[str]) -> dict[str, float]:
    """Synthetic surface -> the regret of somebody who knows all effects of single choices."""
    surfaces = [build(name) for name in wanted]
    return {
        one.name: clairvoyant.regret(one) for one in surfaces if isinstance(one, Analytic) and one.kind == "synthetic"
    }


def beaten(rows: list[Row]) -> dict[str, str]:
    """Surface -> the best of the other policies, where its median regret after all trials is less than ours."""
    medians: dict[str, dict[str, float]] = {}
    for row in rows:
        medians.setdefault(row["surface"], {})[row["policy"]] = row["regret"][str(TRIALS[-1])]["median"]
    best = {surface: min(found, key=lambda one: found[one]) for surface, found in medians.items() if OURS in found}
    return {
        surface: policy
        for surface, policy in best.items()
        if medians[surface][policy] + MARGIN < medians[surface][OURS]
    }


def main() -> None:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the recorded tables and eight other surfaces, few seeds")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="NAME")
    parser.add_argument("--surface", nargs="+", choices=names(), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    wanted = options.surface or ([one for one in names() if one in QUICK] if options.quick else names())
    tasks = [(name, policy, seeds, options.cache) for name in wanted for policy in options.policy]
    rows = collect(tasks, options.jobs)
    show(rows)
    known = known_effects(wanted)
    if known:
        told = [shown(quantile(known.values(), share)).strip() for share in (0.5, 0.9)]
        print(f"\nKnowing all effects but the drawn interactions, {len(known)} synthetic: {told[0]}, p90 {told[1]}")
    better = beaten(rows)
    print(f"\nAnother policy is better than {OURS} by over half a point on {len(better)} of {len(wanted)}: {better}")
    result = {
        "surfaces": written([{key: value for key, value in row.items() if key != "seeds"} for row in rows]),
        "over_all": written(over_all(rows)),
        "beaten": better,
        "known_effects": written(known),
        "seeds": seeds,
        "machine": f"{platform.machine()} {platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - started, 1),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Why the ratios of a recorded table scatter: noise, what a group has in common, and what pairs of choices do.

    python -m benchmarks.table_spreads [--table llama-lora-cpu] [--json FILE]

It prints the standard deviations of ratios' logarithms under which the ratios are likeliest, where choices alone may do
anything (the mixed model of benchmarks/surfaces/recorded.py), and the pairs that are predicted to do most.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.surfaces.recorded import SPREADS, TABLES, Table, choices_of, mixed_model, tables

NOISES = [at / 1000 for at in range(14, 38)]
GROUPS = [at / 1000 for at in range(0, 19, 3)]
PAIRS = [at / 1000 for at in range(0, 31, 2)]
SHOWN = 5  # pairs


def likelihood(covariance: np.ndarray, values: np.ndarray) -> float:
    """The logarithm of the values' density, but for a constant, where they are normal with that covariance."""
    factor = np.linalg.cholesky(covariance)
    return float(-np.log(np.diag(factor)).sum() - 0.5 * (np.linalg.solve(factor, values) ** 2).sum())


def main() -> None:
    """Fit, print, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", choices=tables(), default="llama-lora-cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(TABLES / f"{options.table}.json")
    choices = {key: choices_of(one) for key, one in table.measurements().items()}
    design, values, names = mixed_model(table.ratios(), choices)
    if not len(values):
        parser.exit(1, f"{options.table} has no ratios yet: record it with benchmarks.collect_table --rounds 2\n")
    kinds = np.array([kind for kind, _ in names])
    shared = {kind: design[:, kinds == kind] @ design[:, kinds == kind].T for kind in SPREADS}
    alone, one = SPREADS["choice"] ** 2 * shared["choice"], np.eye(len(values))

    def covariance(noise: float, group: float, pair: float) -> np.ndarray:
        made: np.ndarray = alone + noise**2 * one + group**2 * shared["group"] + pair**2 * shared["pair"]
        return made

    found = {spreads: likelihood(covariance(*spreads), values) for spreads in product(NOISES, GROUPS, PAIRS)}
    noise, group, pair = max(found, key=lambda spreads: found[spreads])
    without = max(value for (_, _, spread), value in found.items() if spread == 0)
    print(f"{options.table}: {len(values)} ratios. Noise {noise:.1%}, a group {group:.1%}, pairs {pair:.1%}")
    print(f"Log-likelihood above that without pairs: {found[noise, group, pair] - without:.1f}")
    predicted = pair**2 * design[:, kinds == "pair"].T @ np.linalg.solve(covariance(noise, group, pair), values)
    pairs = [what for kind, what in names if kind == "pair"]
    order = np.argsort(-np.abs(predicted))[:SHOWN]
    for at in order:
        print(f"{predicted[at]:+.1%} {' with '.join(pairs[at])}")
    if options.json:
        spreads = {"noise": noise, "group": group, "pair": pair, "without_pairs": found[noise, group, pair] - without}
        strongest = [{"pair": pairs[at], "predicted": round(float(predicted[at]), 4)} for at in order]
        result = {"table": options.table, "date": time.strftime("%Y-%m-%d"), "ratios": len(values)}
        options.json.write_text(json.dumps(result | spreads | {"strongest": strongest}, indent=1) + "\n")


if __name__ == "__main__":
    main()

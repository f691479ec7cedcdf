"""Why the ratios of the recorded tables scatter: noise, what a group has in common, and what pairs of choices do.

    python -m benchmarks.table_spreads [--json FILE]

It prints the standard deviations of ratios' logarithms under which each table's ratios are likeliest, where choices
alone may do anything (the mixed model of benchmarks/surfaces/recorded.py), those for all tables together, and the pairs
that are predicted to do most.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.surfaces.recorded import SPREADS, TABLES, Table, choices_of, mixed_model, tables

NOISES = [at / 1000 for at in range(14, 38)]
GROUPS = [at / 1000 for at in range(0, 25, 3)]
PAIRS = [at / 1000 for at in range(0, 31, 2)]
Spreads = tuple[float, float, float]  # of noise, of a group, of pairs
SHOWN = 5  # pairs


@dataclass(frozen=True)
class Seen:
    """A table's ratios as its mixed model has them: their logarithms, and which of them share a pair."""

    name: str
    values: np.ndarray
    design: np.ndarray  # of pairs, of shape (ratios, pairs)
    pairs: list[Any]
    shared: dict[str, np.ndarray]  # kind of effect -> covariances of the ratios where its spread is 1

    def covariance(self, spreads: Spreads) -> np.ndarray:
        """The covariances of the ratios' logarithms."""
        noise, group, pair = spreads
        alone = SPREADS["choice"] ** 2 * self.shared["choice"]
        found: np.ndarray = alone + group**2 * self.shared["group"] + pair**2 * self.shared["pair"]
        return found + noise**2 * np.eye(len(self.values))

    def likelihood(self, spreads: Spreads) -> float:
        """The logarithm of the ratios' density, but for a constant."""
        factor = np.linalg.cholesky(self.covariance(spreads))
        return float(-np.log(np.diag(factor)).sum() - 0.5 * (np.linalg.solve(factor, self.values) ** 2).sum())

    def predicted(self, spreads: Spreads) -> np.ndarray:
        """What each pair is predicted to do."""
        return spreads[2] ** 2 * self.design.T @ np.linalg.solve(self.covariance(spreads), self.values)


def seen(name: str) -> Seen:
    """A committed table."""
    table = Table(TABLES / f"{name}.json")
    choices = {key: choices_of(one) for key, one in table.measurements().items()}
    design, values, names = mixed_model(table.ratios(), choices)
    assert len(values), f"{name} has no ratios yet: record it with benchmarks.collect_table --rounds 2"
    kinds = np.array([kind for kind, _ in names])
    shared = {kind: design[:, kinds == kind] @ design[:, kinds == kind].T for kind in SPREADS}
    return Seen(name, values, design[:, kinds == "pair"], [what for kind, what in names if kind == "pair"], shared)


def fitted(likelihoods: dict[Spreads, float]) -> dict[str, float]:
    """The likeliest spreads, and by how much likelier (a logarithm) they are than the likeliest without pairs."""
    best = max(likelihoods, key=lambda spreads: likelihoods[spreads])
    without = max(value for (_, _, pair), value in likelihoods.items() if pair == 0)
    found = dict(zip(("noise", "group", "pair"), best, strict=True))
    return found | {"above_no_pairs": round(likelihoods[best] - without, 1)}


def main() -> None:
    """Fit, print, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    together = dict.fromkeys(product(NOISES, GROUPS, PAIRS), 0.0)
    rows: list[dict[str, Any]] = []
    for table in map(seen, tables()):
        likelihoods = {spreads: table.likelihood(spreads) for spreads in together}
        together = {spreads: together[spreads] + likelihoods[spreads] for spreads in together}
        found = fitted(likelihoods)
        does = table.predicted((found["noise"], found["group"], found["pair"]))
        order = np.argsort(-np.abs(does))[:SHOWN]
        strongest = [{"pair": table.pairs[at], "predicted": round(float(does[at]), 4)} for at in order]
        rows.append({"table": table.name, "ratios": len(table.values), **found, "strongest": strongest})
    rows.append({"table": "all together", "ratios": sum(row["ratios"] for row in rows), **fitted(together)})
    for row in rows:
        spreads = f"noise {row['noise']:.1%}, a group {row['group']:.1%}, pairs {row['pair']:.1%}"
        print(f"{row['table']}: {row['ratios']} ratios; {spreads} ({row['above_no_pairs']} above no pairs)")
        for one in row.get("strongest", ()):
            print(f"  {one['predicted']:+.1%} {' with '.join(one['pair'])}")
    if options.json:
        options.json.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "tables": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

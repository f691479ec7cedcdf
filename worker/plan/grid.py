"""The search space of one method as rows of numbers, so that thousands of configurations are looked at together.

A row has a column for each lever and one for the effective batch; its numbers are places in `options`. The first
`sizes` options of a column are those of the search space. What was measured outside of it, such as the baseline's
choices, comes after them: a row may hold these, but none is proposed.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from service.contract.configuration import Configuration
from service.contract.job import JobSpec, Method
from service.levers import circumstances, exclusions
from service.space import Space, applicable
from worker.plan.space import make

Rows = NDArray[np.int64]  # (configurations, columns)
Floats = NDArray[np.float64]
EFFECTIVE = "effective_batch_size"


class Grid:
    """Encodes configurations as rows, finds the neighbours of rows, and knows which rows are valid combinations."""

    def __init__(
        self,
        spec: JobSpec,
        method: Method,
        choices: Space,
        effectives: tuple[int, ...],
        seen: list[Configuration],
    ) -> None:
        self._spec, self._method = spec, method
        space = applicable(choices, method, spec.task)
        space[EFFECTIVE] = tuple(map(str, effectives))
        found = [_values(one) for one in seen]
        self.names = tuple(space)
        self.sizes = np.array([len(space[name]) for name in self.names])
        self.options = [tuple(dict.fromkeys((*space[name], *(one[name] for one in found)))) for name in self.names]
        self._place = [{option: at for at, option in enumerate(options)} for options in self.options]
        self._rules = self._prepared()

    def effectives(self) -> tuple[str, ...]:
        """All effective batches, as options: those of the search space, then others that were tried."""
        return self.options[self.names.index(EFFECTIVE)]

    def encode(self, configuration: Configuration) -> Rows:
        """A configuration's row, of shape (columns,)."""
        values = _values(configuration)
        return np.array([place[values[name]] for name, place in zip(self.names, self._place, strict=True)])

    def decode(self, row: Rows) -> Configuration | None:
        """The configuration of a row, or None when it is an excluded combination."""
        values = {name: self.options[at][row[at]] for at, name in enumerate(self.names)}
        effective = int(values.pop(EFFECTIVE))
        return make(self._spec, self._method, values, effective)

    def nearest(self, row: Rows) -> Rows:
        """The row with the first option of the space in every column that is outside of it."""
        return np.where(row < self.sizes, row, 0)

    def valid(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows are in the search space and no excluded combination."""
        good: NDArray[np.bool_] = np.all(rows < self.sizes, axis=1)
        for rule in self._rules:
            hit = np.ones(len(rows), dtype=bool)
            for column, members in rule:
                hit &= members[rows[:, column]]
            good &= ~hit
        return good

    def neighbours(self, row: Rows, switches: int = 1) -> Rows:
        """All valid rows that differ from `row` in one column, or in one or two, without the row itself."""
        single = [
            (column, option)
            for column, size in enumerate(self.sizes)
            for option in range(size)
            if option != row[column]
        ]
        pairs = [pair for pair in combinations(single, 2) if pair[0][0] != pair[1][0]] if switches == 2 else []
        found = np.repeat(row[None, :], len(single) + len(pairs), axis=0)
        for at, (column, option) in enumerate(single):
            found[at, column] = option
        for at, pair in enumerate(pairs, start=len(single)):
            for column, option in pair:
                found[at, column] = option
        kept: Rows = found[self.valid(found)]
        return kept

    def table(self, of_choice: dict[tuple[str, str], float]) -> Floats:
        """A table (columns, options) of numbers by (column's name, option), for `look_up`; 0 where there is none."""
        found = np.zeros((len(self.names), max(map(len, self.options))))
        for at, name in enumerate(self.names):
            for place, option in enumerate(self.options[at]):
                found[at, place] = of_choice.get((name, option), 0.0)
        return found

    def members(self, name: str, values: tuple[str, ...]) -> NDArray[np.bool_]:
        """Which options of a column are among `values`."""
        return np.array([option in values for option in self.options[self.names.index(name)]])

    def _prepared(self) -> list[list[tuple[int, NDArray[np.bool_]]]]:
        """For each exclusion that this job's circumstances do not rule out: its columns, and which options it names."""
        point, rules = circumstances(self._spec, self._method), []
        for exclusion in exclusions():
            outside = {name: values for name, values in exclusion.when.items() if name not in self.names}
            if all(point.get(name) in values for name, values in outside.items()):
                inside = [(name, values) for name, values in exclusion.when.items() if name in self.names]
                rules.append([(self.names.index(name), self.members(name, values)) for name, values in inside])
        return rules


def look_up(table: Floats, rows: Rows) -> Floats:
    """The table's number for each entry of the rows, in the shape of the rows."""
    return table[np.arange(table.shape[0]), rows]


def _values(configuration: Configuration) -> dict[str, str]:
    return {**configuration.levers, EFFECTIVE: str(configuration.effective_batch_size)}

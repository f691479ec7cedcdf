"""What made trials fail: a choice, or two together, that a failed trial had and that no trial which ran had."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from worker.plan.grid import Floats, Rows

# How many times likelier the cause is something that two failures have in common than something that only one had.
SHARED = 20.0
MOST_SHARED = 50.0  # failures that count as having something in common: more would be as sure
SINGLE = 3.0  # how many times likelier a choice cannot run at all than only beside a certain other one


class Culprits:
    """Shares the blame for each failure out among the failed row's choices and pairs of choices.

    `first` is the number of each column's first option, where all options of all columns are numbered through; a pair
    is an entry of a square table over these numbers, and a single choice is its pair with itself.
    """

    def __init__(self, options: list[tuple[str, ...]], ran: Rows, failed: Rows) -> None:
        count = sum(map(len, options))
        self._first = np.cumsum([0, *map(len, options)])[:-1]
        self._failed = failed
        self._cleared = np.zeros((count, count), dtype=bool)
        for places in ran + self._first:
            self._cleared[np.ix_(places, places)] = True
        self._suspects = [self._suspected(places) for places in failed + self._first]
        failures = np.sum(self._suspects, axis=0) if self._suspects else np.zeros((count, count))
        self._weights = SHARED ** np.clip(failures - 1.0, 0.0, MOST_SHARED)
        self._weights[np.diag_indices(count)] *= SINGLE

    def unseen(self, rows: Rows) -> Floats:
        """How many of each row's choices and pairs no trial that ran had."""
        return self._sum((~self._cleared).astype(float), rows)

    def blamed(self, failure: int, rows: Rows) -> Floats:
        """The probability that each row has what made that failure's row fail, by the blame of what they share."""
        suspects = self._weights * self._suspects[failure]
        total = float(np.triu(suspects).sum())
        if total == 0.0:  # three choices or more are to blame, so only rows that have nearly all of them
            found: Floats = (rows == self._failed[failure]).mean(axis=1) ** 3
            return found
        return self._sum(suspects, rows) / total

    def _suspected(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The pairs that a failed row has and that are not cleared, as a table."""
        mine = np.zeros_like(self._cleared)
        mine[np.ix_(places, places)] = True
        return mine & ~self._cleared

    def _sum(self, table: Floats, rows: Rows) -> Floats:
        """The sum of the table's entries for all choices and pairs of each row."""
        places, (one, other) = rows + self._first, np.triu_indices(rows.shape[1])
        found: Floats = table[places[:, one], places[:, other]].sum(axis=1)
        return found

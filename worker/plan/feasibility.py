"""How likely a configuration runs to its end, by what the catalogue says of memory and by the trials that did not.

Two things rule a configuration out: two others that need no more memory did not fit at a micro batch of 1, or the
memory line (peak bytes by micro batch) of the most similar trial puts it far over the device's memory. All others have
a chance. A failed trial lowers that of configurations which share what made it fail: a choice, or two that do not go
together, which is in no trial that ran (worker/plan/culprits.py), or too little memory saved. Which of the two is
likelier is told by the failed trial's predicted peak, once memory lines are known.

The catalogue's memory factors are only about right. Whether a configuration fits that is one choice from a trial that
ran is therefore learnt from the trials: from their memory lines, and from what ran out of memory
(worker/plan/peaks.py). Where most trials ran out of memory, all configurations are judged so, and none is ruled out.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from service.contract.configuration import Configuration
from service.contract.measurement import Measurement, Outcome
from worker.plan.culprits import Culprits
from worker.plan.grid import Floats, Grid, Rows
from worker.plan.memory_needs import coordinates, memory_tables, saved, scaled
from worker.plan.peaks import PeakModel
from worker.plan.surrogate import cumulative
from worker.plan.view import View, is_lacked, was_given_too_much

UNSEEN = 0.001  # probability that a pair of choices which was in no trial that ran makes one fail
SURE = 0.98  # probability that what made a trial fail does so again
SHORT = 0.7  # probability that a trial ran out of memory by its total, and not because one pair of choices cannot run
ENOUGH_SAVED = 0.4  # saving this much of the logarithm of memory divides the chance of running out again by e
ENOUGH_FAILURES = 2  # that rule a row out: one may have a cause of its own, such as a kernel's large buffer
FAR_OVER = 1.6  # times the device's memory, which no error of the catalogue's factors explains
LINE_SPREAD = 0.25  # standard deviation of the logarithm of a scaled memory line's peak
# The catalogue's factors have to be wrong where at least MISTAKEN trials ran out of memory, and more than
# MISTAKEN_TIMES as many as ran.
MISTAKEN, MISTAKEN_TIMES = 4, 2
TINY = 1e-12  # where neither is likely, so that nothing is divided by 0


class Feasibility:
    """Judges rows of a grid by the trials of a method.

    `learns`: so many trials ran out of memory that the learnt peaks judge every row, and the catalogue's factors rule
    none out.
    """

    def __init__(self, view: View, grid: Grid) -> None:
        self._grid = grid
        self._tables = memory_tables(view, grid)
        self._ok = [one for one in view.history if one.outcome is Outcome.ok]
        self._lined = [(one, one.memory_line) for one in self._ok if one.memory_line is not None]
        self._ran = _encoded(grid, [one.configuration for one in self._ok])
        failed = [one for one in view.history if one.outcome is not Outcome.ok and not _has_known_cause(one, view)]
        ran_out = [one for one in failed if one.outcome is Outcome.infeasible]
        self.learns = len(ran_out) >= MISTAKEN and len(ran_out) > MISTAKEN_TIMES * len(self._ok)
        self._capacity = _capacity(view)
        self._hopeless = self._explained_by_memory([one.configuration for one in ran_out])
        self._failed = _encoded(grid, [one.configuration for one in failed])
        earlier = _encoded(grid, [one.configuration for one in view.earlier])
        self._culprits = Culprits(grid.options, np.vstack([self._ran, earlier]), self._failed)
        self._learnt = self._learnt_from(ran_out)
        self._short = self._probably_short(failed)

    def impossible(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows cannot fit: two that need no more did not, or they are predicted far over the capacity."""
        if self.learns:
            return np.zeros(len(rows), dtype=bool)
        mine = coordinates(self._tables, rows)
        over = _no_less(mine, self._hopeless).sum(axis=1) >= ENOUGH_FAILURES
        found: NDArray[np.bool_] = over | (self.peaks(rows) > FAR_OVER * self._capacity)
        return found

    def chance(self, rows: Rows) -> Floats:
        """The probability that each row runs to its end: it has not what made other trials fail, and it fits."""
        found, learnt = self._innocent(rows), self._is_learnt(rows)
        mine, before = self.saved(rows), self.saved(self._failed)
        for at, short in enumerate(self._short):
            lacks = np.exp(-np.maximum(mine - before[at], 0.0) / ENOUGH_SAVED)
            lacks = np.where(learnt, 0.0, lacks)  # what the failure tells of memory is in the learnt peaks
            again = short * lacks + (1 - short) * self._culprits.blamed(at, rows)
            found = np.minimum(found, 1 - SURE * again)
        if self._learnt is not None:
            found[learnt] *= self._learnt.fits(rows[learnt])
        found[~learnt] *= self._fits(rows[~learnt])
        return found

    def _is_learnt(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows the learnt peaks judge: all where `learns`, else those one choice from a trial that ran."""
        if self._learnt is None or self.learns:
            return np.full(len(rows), self.learns)
        switched = (rows[:, None, :] != self._ran[None, :, :]).sum(axis=2)
        near: NDArray[np.bool_] = switched.min(axis=1) <= 1
        return near

    def saved(self, rows: Rows) -> Floats:
        """How much memory each row saves, as a logarithm."""
        return saved(coordinates(self._tables, rows))

    def _innocent(self, rows: Rows) -> Floats:
        """The probability that no pair of each row's choices makes it fail; pairs of a trial that ran do not."""
        found: Floats = (1 - UNSEEN) ** self._culprits.unseen(rows)
        return found

    def _fits(self, rows: Rows) -> Floats:
        """The probability that each row fits at a micro batch of 1, by its predicted peak."""
        return cumulative(np.log(self._capacity / np.maximum(self.peaks(rows), 1.0)) / LINE_SPREAD)

    def _probably_short(self, failed: list[Measurement]) -> Floats:
        """The probability of each failure that memory was short as a whole: where lines are known, they tell.

        By Bayes' rule: how likely its predicted peak is over the memory, against how likely it has a pair that fails.
        """
        ran_out = np.array([one.outcome is Outcome.infeasible for one in failed], dtype=float)
        if self.learns:
            return ran_out
        if not self._lined:
            return ran_out * SHORT
        over = 1 - self._fits(self._failed)
        pair = (1 - over) * (1 - self._innocent(self._failed))
        found: Floats = ran_out * over / np.maximum(over + pair, TINY)
        return found

    def _learnt_from(self, ran_out: list[Measurement]) -> PeakModel | None:
        """What trials tell of peaks, where some ran out of memory, and lines are known or the factors are wrong."""
        if not self.learns and not (ran_out and self._lined):
            return None
        return PeakModel(self._grid, self._tables, self._ok, ran_out, self._capacity)

    def _explained_by_memory(self, hopeless: list[Configuration]) -> Floats:
        """The coordinates of failures that memory alone explains: nothing that needs as much in all of them has run."""
        mine = coordinates(self._tables, _encoded(self._grid, hopeless))
        ran = coordinates(self._tables, self._ran)
        return mine[~_no_less(ran, mine).any(axis=0)]

    def peaks(self, rows: Rows, micro: float = 1.0) -> Floats:
        """The predicted peak bytes at a micro batch, by the memory line of the most similar trial; 0 without."""
        if not self._lined:
            return np.zeros(len(rows))
        known = _encoded(self._grid, [one.configuration for one, _ in self._lined])
        nearest = (rows[:, None, :] == known[None, :, :]).sum(axis=2).argmax(axis=1)
        change = coordinates(self._tables, rows) - coordinates(self._tables, known)[nearest]
        rest = np.array([line.rest_bytes for _, line in self._lined])[nearest]
        slope = np.array([line.slope_bytes for _, line in self._lined])[nearest]
        trained = np.array([float(one.trainable_parameters or 0) for one, _ in self._lined])[nearest]
        weights = np.array([float(one.parameters or 0) for one, _ in self._lined])[nearest]
        rest, samples = scaled(rest, slope, change, weights, trained, micro)
        peaks: Floats = np.maximum(rest, 0.0) + samples
        return peaks


def _has_known_cause(failed: Measurement, view: View) -> bool:
    """Whether it is known why a trial failed, so that nothing else is to blame.

    The model lacks one of its choices, which is then not tried again; or it was given its micro batch, as the baseline
    is, and may fit at a smaller one.
    """
    return was_given_too_much(failed) or is_lacked(failed.configuration, view.lacks)


def _capacity(view: View) -> float:
    """The bytes that trials may use: as one of them said, or the device's memory up to the job's cap."""
    said = [float(one.capacity_bytes) for one in view.history if one.capacity_bytes]
    cap = view.spec.hardware.memory_gib
    return min(said) if said else min(float(view.facts.memory_bytes), cap * 2**30 if cap else math.inf)


def _no_less(ones: Floats, others: Floats) -> NDArray[np.bool_]:
    """(ones, others): whether each one needs no less memory than each other in any coordinate."""
    found: NDArray[np.bool_] = np.all(ones[:, None, :] >= others[None, :, :] - 1e-9, axis=2)
    return found


def _encoded(grid: Grid, configurations: list[Configuration]) -> Rows:
    if not configurations:
        return np.empty((0, len(grid.names)), dtype=np.int64)
    return np.array([grid.encode(one) for one in configurations])

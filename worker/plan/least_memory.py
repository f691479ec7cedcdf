"""What untried configurations promise a job that asks for the least memory: a smaller peak, without being slower.

A second surrogate models the logarithm of the peak. It begins with what the catalogue's factors make of the trials'
memory lines, and learns from the trials' peaks, each at the micro batch that its trial chose. A configuration promises
the expected improvement of the peak, times the chance that it is not slower than the baseline by the first surrogate,
times the chance that it runs.
"""

from __future__ import annotations

import math
import statistics

import numpy as np

from service.contract.configuration import Configuration
from service.contract.measurement import Measurement
from service.contract.objective import run_seconds, training_seconds
from service.levers import LEVERS
from worker.plan.acquisition import Acquisition
from worker.plan.feasibility import Feasibility
from worker.plan.grid import Floats, Grid, Rows
from worker.plan.prior import Prior
from worker.plan.surrogate import Surrogate, cumulative
from worker.plan.view import View

PEAK_NOISE = 0.01  # standard deviation of the logarithm of a trial's peak
# Standard deviation of the logarithm of what a choice does to the peak: SHARE_UNSURE of what the catalogue expects it
# to do to activations, which are a part of the peak; at least HELD_UNSURE for HOLDING levers, LEAST_UNSURE for others.
SHARE_UNSURE, LEAST_UNSURE, HELD_UNSURE = 0.3, 0.03, 0.15
HOLDING = ("optimizer", "precision", "quantization")  # levers that say what is held between steps
LEAST_CHANCE = 1e-6  # that a row is not slower than the baseline, so that a leap may lead over slower ones


class MemoryPrior(Prior):
    """What the catalogue and the memory lines expect of the logarithm of the peak."""

    def __init__(self, view: View, grid: Grid, feasibility: Feasibility, micro: float) -> None:
        super().__init__(view, grid)
        self._feasibility, self._micro = feasibility, micro
        self.spread = grid.table(
            {
                (name, choice.name): max(
                    SHARE_UNSURE * abs(math.log(choice.memory.activations)),
                    HELD_UNSURE if name in HOLDING else LEAST_UNSURE,
                )
                for name, lever in LEVERS.items()
                for choice in lever.choices
                if choice.name != lever.baseline
            }
        )

    def expected(self, rows: Rows) -> Floats:
        """The expected logarithm of each row's peak; without a memory line, how much more it takes than others."""
        peaks = self._feasibility.peaks(rows, self._micro)
        return np.log(peaks) if np.all(peaks > 0) else -self._feasibility.saved(rows)


class MemoryAcquisition(Acquisition):
    """Looks at the same configurations as `Acquisition`, but for the smallest peak."""

    _memory: Surrogate | None = None  # predicts the peak, once a trial has told one

    def _fit(self, view: View, ran: list[Measurement], waiting: list[Configuration]) -> None:
        """Set the surrogate of the seconds, that of the peaks, and the seconds that a run may take (`_most`)."""
        super()._fit(view, ran, waiting)
        reference = view.baseline()
        self._most = run_seconds(view.spec, reference) if reference else math.inf
        self._memory = self._fitted_to_peaks(view, ran, waiting)

    def _fitted_to_peaks(self, view: View, ran: list[Measurement], waiting: list[Configuration]) -> Surrogate | None:
        """The surrogate of the peaks; None where no trial told its own."""
        told = [one for one in ran if one.peak_bytes]
        if not told:
            return None
        micro = statistics.median(one.micro_batch_size or 1 for one in told)
        prior = MemoryPrior(view, self._grid, self._feasibility, micro)
        rows = np.array([self._grid.encode(one.configuration) for one in told])
        values = np.array([math.log(one.peak_bytes or 1) for one in told])
        made = Surrogate(prior, rows, values, np.full(len(told), PEAK_NOISE))
        if not waiting:
            return made
        more = np.array([self._grid.encode(one) for one in waiting])
        values = np.append(values, made.predict(more)[0])  # of trials under way it is told what it expects itself
        return Surrogate(prior, np.vstack([rows, more]), values, np.full(len(values), PEAK_NOISE))

    def _training(self, view: View, measured: Measurement) -> float:
        """The seconds at the fastest timed micro batch: the faster, the smaller a micro batch is still fast enough."""
        return min(training_seconds(view.spec, measured, one) for one in (*measured.curve, measured.timing))

    def _least_so_far(self, view: View, ran: list[Measurement], best: list[Rows]) -> float:
        """The logarithm of the least peak of all that ran, the baseline included."""
        least = min(map(view.score, ran), default=math.inf)
        if self._memory and math.isfinite(least):
            return math.log(least)
        return super()._least_so_far(view, ran, best)

    def _run(self, rows: Rows) -> tuple[Floats, Floats]:
        """(expected logarithm of the peak, its standard deviation)."""
        return self._memory.predict(rows) if self._memory else super()._run(rows)

    def _chance(self, rows: Rows) -> Floats:
        """The logarithm of the chance that each row runs to its end, and is not slower than the baseline."""
        found = super()._chance(rows)
        if self._surrogate is None or not math.isfinite(self._most):
            return found
        mean, deviation = super()._run(rows)
        return found + np.log(np.maximum(cumulative((math.log(self._most) - mean) / deviation), LEAST_CHANCE))

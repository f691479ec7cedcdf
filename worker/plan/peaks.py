"""Peaks at a micro batch of 1, as memory lines and trials that ran out of memory tell of them.

worker/plan/feasibility.py asks for configurations that are one choice from a trial that ran, and for all of them where
most trials ran out of memory.

The logarithm of the peak is modelled as that of the seconds is (worker/plan/surrogate.py). It begins with what the
catalogue's factors make of one memory line; each other line tells how far they are off, choice by choice. A trial that
ran out of memory tells that its peak is above the device's, though not how far: it counts as a normal observation with
the mean and the variance that the truncated distribution asks for (assumed-density filtering, as for the probit
likelihood: Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning", section 3.6). So what many failures
have in common is avoided, and what was not tried yet is likelier to fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.contract.measurement import Measurement, MemoryLine
from service.levers import LEVERS
from worker.plan.grid import Floats, Grid, Rows
from worker.plan.memory_needs import coordinates, saved, scaled
from worker.plan.surrogate import Surrogate, cumulative

# Standard deviation of the logarithm of what a choice does to the peak: a part of what the catalogue expects it to do
# to activations, and at least so much, as the allocator's fragments differ too. Chosen on 160 synthetic surfaces beside
# those of benchmarks/search_regret.py: with less, more jobs in which nothing fits at first end without an answer.
SHARE_UNSURE, LEAST_UNSURE = 0.3, 0.2
NOISE = 0.02  # standard deviation of the logarithm of a peak that a memory line tells
SHARE = 0.7  # of the change in activations and state, by which the peak changes where the model's size is not known
GRADIENT = 4.0  # bytes of a trained weight's gradient
LEAST_ACTIVATIONS = 0.3  # of the memory, that the activations of a micro batch of 1 are assumed to need
# How far the peak of the first trial that ran out of memory is assumed to be over the capacity, where nothing ran: mean
# and standard deviation of the logarithm.
OVER, OVER_SPREAD = 0.7, 0.8
LEAST_REST = 0.05  # of the line's bytes at rest: what is left of them at least, however much choices save
OTHERWISE = 0.02  # probability that a trial ran out of memory for another reason than that it holds too much
TINY = 1e-300  # so that nothing is divided by 0
LEAST_PRECISION = 1e-3  # of an observation that is kept: one over its variance
MOST_FAILURES = 60  # that are learnt from, the latest: each costs a fit


@dataclass(frozen=True)
class Reference:
    """A row whose memory line is known or assumed, and how many parameters the model has and trains."""

    row: Rows
    line: MemoryLine
    parameters: float
    trained: float


class PeakPrior:
    """What the catalogue expects of the logarithm of the peak, and how unsure that is.

    `tables` are those of `memory_tables`. The memory line of `reference` is scaled by them; without one, what is
    expected is how much more a row takes than others.
    """

    def __init__(self, tables: list[Floats], grid: Grid, reference: Reference | None) -> None:
        self._tables, self._reference = tables, reference
        unsure = {
            (name, choice.name): max(SHARE_UNSURE * abs(math.log(choice.memory.activations)), LEAST_UNSURE)
            for name, lever in LEVERS.items()
            if lever.touches_memory
            for choice in lever.choices
            if choice.name != lever.baseline
        }
        self.spread, self.families = grid.table(unsure), grid.table({})

    def expected(self, rows: Rows) -> Floats:
        """The expected logarithm of each row's peak."""
        mine, reference = coordinates(self._tables, rows), self._reference
        if reference is None:
            return -SHARE * saved(mine)
        change, line = mine - coordinates(self._tables, reference.row[None, :]), reference.line
        rest, samples = scaled(line.rest_bytes, line.slope_bytes, change, reference.parameters, reference.trained)
        return np.log(np.maximum(np.maximum(rest, LEAST_REST * line.rest_bytes) + samples, line.update_bytes))


class PeakModel:
    """How likely rows fit into `capacity` bytes, by the trials that `ran` and those that `ran_out`, in their order."""

    def __init__(
        self,
        grid: Grid,
        tables: list[Floats],
        ran: Sequence[Measurement],
        ran_out: Sequence[Measurement],
        capacity: float,
    ) -> None:
        self._limit = math.log(max(capacity, 1.0))
        lines = [(grid.encode(one.configuration), one.memory_line, one) for one in ran if one.memory_line is not None]
        self._prior = PeakPrior(tables, grid, _known(lines) or _assumed(grid, tables, ran_out, capacity))
        self._rows = [row for row, *_ in lines]
        self._values = [math.log(max(line.at(1), 1.0)) for _, line, _ in lines]
        self._noise = [NOISE] * len(lines)
        for one in ran_out[-MOST_FAILURES:]:
            self._learn(grid.encode(one.configuration))
        self._surrogate = self._fitted()

    def fits(self, rows: Rows) -> Floats:
        """The probability that each row fits at a micro batch of 1."""
        mean, deviation = self._surrogate.predict(rows)
        return cumulative((self._limit - mean) / np.maximum(deviation, NOISE))

    def _fitted(self) -> Surrogate:
        return Surrogate(self._prior, np.array(self._rows), np.array(self._values), np.array(self._noise))

    def _learn(self, row: Rows) -> None:
        """Learn that a row's peak is above the limit, unless it failed for another reason."""
        if not self._rows:
            self._observe(row, self._limit + OVER, OVER_SPREAD)
            return
        mean, deviation = (float(one[0]) for one in self._fitted().predict(row[None, :]))
        score = (mean - self._limit) / deviation
        over = float(cumulative(np.array([score]))[0])
        is_so = over / max(over + (1 - over) * OTHERWISE, TINY)  # Bayes' rule
        # The first two derivatives of the logarithm of the mass above the limit, by the mean.
        ratio = math.exp(-0.5 * score**2) / math.sqrt(2 * math.pi) / max(over, TINY)
        first, second = ratio / deviation, -ratio * (score + ratio) / deviation**2
        precision = -second / (1 + deviation**2 * second) * is_so
        if precision > LEAST_PRECISION:
            self._observe(row, mean - first / second, precision**-0.5)

    def _observe(self, row: Rows, value: float, noise: float) -> None:
        self._rows.append(row)
        self._values.append(value)
        self._noise.append(noise)


def _known(lines: list[tuple[Rows, MemoryLine, Measurement]]) -> Reference | None:
    """The memory line that was measured last."""
    if not lines:
        return None
    row, line, ran = lines[-1]
    return Reference(row, line, float(ran.parameters or 0), float(ran.trainable_parameters or 0))


def _assumed(grid: Grid, tables: list[Floats], ran_out: Sequence[Measurement], capacity: float) -> Reference | None:
    """The reference from the first trial that ran out of memory and had built its model, or None.

    Its bytes at rest follow from the model's size. Activations are assumed to take what the capacity times exp(OVER)
    leaves, and at least LEAST_ACTIVATIONS of the capacity.
    """
    built = next((one for one in ran_out if one.parameters is not None), None)
    if built is None:
        return None
    row = grid.encode(built.configuration)
    parameters, trained = float(built.parameters or 0), float(built.trainable_parameters or 0)
    _, state, weight = (float(one) for one in coordinates(tables, row[None, :])[0])
    rest = parameters * weight + trained * (state + GRADIENT)
    slope = max(capacity * math.exp(OVER) - rest, LEAST_ACTIVATIONS * capacity)
    return Reference(row, MemoryLine(rest_bytes=rest, slope_bytes=slope), parameters, trained)

"""A Gaussian process over configurations: what all of them are expected to take, from the few that were measured.

The logarithm of the seconds is modelled as a sum: what each choice does by itself, what pairs and triples of choices do
together, and noise. The effects are normal, so the kernel between two configurations is a sum over the choices that
they share, and over the pairs and triples of these (an additive kernel: Duvenaud et al. 2011, "Additive Gaussian
Processes"); two choices of one lever are alike in part, and nearly the same where the catalogue puts them in a family.
The prior means and spreads are the catalogue's; how strong interactions are, and how far the catalogue may be off, is
chosen by the likelihood of the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.plan.grid import Floats, Rows, look_up
from worker.plan.prior import Prior

LEVEL = 1.0  # standard deviation of the level that all configurations share
UNIT = 0.15  # spread of a choice whose pairs with one of the same spread have a spread of `pairs` x UNIT
# (factor on the catalogue's spreads, how strong pairs are, how much likelier others must make the measurements)
STRENGTHS = ((0.8, 0.3, 0.5), (1.3, 0.3, 0.0), (1.3, 0.6, 0.5), (2.0, 0.4, 1.0), (2.0, 0.8, 1.5))
ALIKE = 0.5  # correlation of two choices of one lever: what leaves the baseline's choice tends to do the same
FAMILY = 0.85  # correlation of two choices of one family, such as two kinds of autocast
TRIPLES = 0.5  # how strong triples are: of the square of pairs' strength


@dataclass(frozen=True)
class Kernel:
    """The covariance of two configurations' logarithms.

    `spread` and `families` are the prior's tables, `pairs` is how strongly choices interact.
    """

    spread: Floats
    families: Floats
    pairs: float

    def between(self, ones: Rows, others: Rows) -> Floats:
        """The covariances, of shape (ones, others)."""
        weights = look_up(self.spread, ones)[:, None, :] * look_up(self.spread, others)[None, :, :]
        mine, theirs = look_up(self.families, ones)[:, None, :], look_up(self.families, others)[None, :, :]
        alike = np.where((mine == theirs) & (mine > 0), FAMILY, ALIKE)
        shared = weights * np.where(ones[:, None, :] == others[None, :, :], 1.0, alike)
        first, second, third = shared.sum(axis=2), (shared**2).sum(axis=2), (shared**3).sum(axis=2)
        return self._sum(first, second, third)

    def diagonal(self, rows: Rows) -> Floats:
        """The variance of each row."""
        weights = look_up(self.spread, rows) ** 2
        return self._sum(weights.sum(axis=1), (weights**2).sum(axis=1), (weights**3).sum(axis=1))

    def _sum(self, first: Floats, second: Floats, third: Floats) -> Floats:
        """Level, single choices, pairs and triples from the power sums of the shared choices' variances."""
        pairs = (first**2 - second) / 2
        triples = (first**3 - 3 * first * second + 2 * third) / 6
        strength = (self.pairs / UNIT) ** 2
        return LEVEL**2 + first + strength * pairs + (TRIPLES * strength) ** 2 * triples


class Surrogate:
    """Predicts the logarithm of the seconds of any row, with a standard deviation, from measured rows."""

    def __init__(self, prior: Prior, rows: Rows, values: Floats, noise: Floats) -> None:
        self._prior, self._rows = prior, rows
        self._level = float(np.mean(values - prior.expected(rows)))
        residuals = values - self._expected(rows)
        fits = [
            (_Fit(Kernel(prior.spread * factor, prior.families, pairs / factor), rows, residuals, noise), against)
            for factor, pairs, against in STRENGTHS
        ]
        self._fit = max(fits, key=lambda pair: pair[0].likelihood - pair[1])[0]

    def _expected(self, rows: Rows) -> Floats:
        return self._level + self._prior.expected(rows)

    def predict(self, rows: Rows) -> tuple[Floats, Floats]:
        """(expected logarithm of the seconds, its standard deviation without a measurement's noise) of each row."""
        across = self._fit.kernel.between(rows, self._rows)
        mean = self._expected(rows) + across @ self._fit.weights
        solved = np.linalg.solve(self._fit.factor, across.T)
        variance = self._fit.kernel.diagonal(rows) - (solved**2).sum(axis=0)
        return mean, np.sqrt(np.maximum(variance, 1e-10))


class _Fit:
    """A kernel with the Cholesky factor of the measured rows' covariance, and the likelihood of what was measured."""

    def __init__(self, kernel: Kernel, rows: Rows, residuals: Floats, noise: Floats) -> None:
        self.kernel = kernel
        covariance = kernel.between(rows, rows) + np.diag(noise**2)
        self.factor = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(rows)))
        half = np.linalg.solve(self.factor, residuals)
        self.weights = np.linalg.solve(self.factor.T, half)
        self.likelihood = float(-0.5 * half @ half - np.log(np.diag(self.factor)).sum())

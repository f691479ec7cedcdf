"""A Gaussian process over configurations: what all of them are expected to take, from the few that were measured.

The logarithm of the seconds is modelled as a sum: what each choice does by itself, what pairs and triples of choices do
together, and noise. The effects are normal, so the kernel between two configurations is a sum over the choices that
they share, and over the pairs and triples of these (an additive kernel: Duvenaud et al. 2011, "Additive Gaussian
Processes"); two choices of one lever are alike in part, and nearly the same where the catalogue puts them in a family.
The prior means and spreads are the catalogue's; how strong interactions are, and how far the catalogue may be off, is
told by the likelihood of the measurements: several assumptions are kept, each with the share that they give it.
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
LEAST_SHARE = 0.01  # of an assumption that is kept
# Least spread of a choice in pairs and triples: what does nothing by itself may still do something with another.
INTERACTING = 0.1
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
        mine, theirs = look_up(self.families, ones)[:, None, :], look_up(self.families, others)[None, :, :]
        alike = np.where((mine == theirs) & (mine > 0), FAMILY, ALIKE)
        alike = np.where(ones[:, None, :] == others[None, :, :], 1.0, alike)

        def shared(spread: Floats) -> Floats:
            found: Floats = look_up(spread, ones)[:, None, :] * look_up(spread, others)[None, :, :] * alike
            return found

        return self._sum(shared(self.spread), shared(self._interacting))

    def diagonal(self, rows: Rows) -> Floats:
        """The variance of each row."""
        return self._sum(look_up(self.spread, rows) ** 2, look_up(self._interacting, rows) ** 2)

    @property
    def _interacting(self) -> Floats:
        """The spreads of choices in pairs and triples; what is sure to do nothing does nothing there either."""
        return np.where(self.spread > 0, np.maximum(self.spread, INTERACTING), 0.0)

    def _sum(self, single: Floats, interacting: Floats) -> Floats:
        """Level, single choices, pairs and triples, from the shared variances of each column, the last axis.

        Those of all pairs and triples follow from power sums (Newton's identities).
        """
        first, second, third = ((interacting**power).sum(axis=-1) for power in (1, 2, 3))
        pairs = (first**2 - second) / 2
        triples = (first**3 - 3 * first * second + 2 * third) / 6
        strength = (self.pairs / UNIT) ** 2
        found: Floats = LEVEL**2 + single.sum(axis=-1) + strength * pairs + (TRIPLES * strength) ** 2 * triples
        return found


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
        likelihoods = np.array([fit.likelihood - against for fit, against in fits])
        shares = np.exp(likelihoods - likelihoods.max())
        shares = np.where(shares < LEAST_SHARE * shares.sum(), 0.0, shares)
        self._fits = [(fit, share) for (fit, _), share in zip(fits, shares / shares.sum(), strict=True) if share > 0]

    def _expected(self, rows: Rows) -> Floats:
        return self._level + self._prior.expected(rows)

    def predict(self, rows: Rows) -> tuple[Floats, Floats]:
        """(expected logarithm of the seconds, its standard deviation without a measurement's noise) of each row."""
        mean, square = np.zeros(len(rows)), np.zeros(len(rows))
        for fit, share in self._fits:
            across = fit.kernel.between(rows, self._rows)
            expected = across @ fit.weights
            solved = np.linalg.solve(fit.factor, across.T)
            variance = np.maximum(fit.kernel.diagonal(rows) - (solved**2).sum(axis=0), 1e-10)
            mean += share * expected
            square += share * (variance + expected**2)
        return self._expected(rows) + mean, np.sqrt(np.maximum(square - mean**2, 1e-10))


class _Fit:
    """A kernel with the Cholesky factor of the measured rows' covariance, and the likelihood of what was measured."""

    def __init__(self, kernel: Kernel, rows: Rows, residuals: Floats, noise: Floats) -> None:
        self.kernel = kernel
        covariance = kernel.between(rows, rows) + np.diag(noise**2)
        self.factor = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(rows)))
        half = np.linalg.solve(self.factor, residuals)
        self.weights = np.linalg.solve(self.factor.T, half)
        self.likelihood = float(-0.5 * half @ half - np.log(np.diag(self.factor)).sum())

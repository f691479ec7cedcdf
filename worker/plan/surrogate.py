"""A Gaussian process over configurations: what all of them are expected to take, from the few that were measured.

The logarithm of the seconds is modelled as a sum: what each choice does by itself, what pairs and triples of choices do
together, and noise. The effects are normal, so the kernel between two configurations is a sum over the choices that
they share, and over the pairs and triples of these (an additive kernel: Duvenaud et al. 2011, "Additive Gaussian
Processes"); two choices of one lever are alike in part, and more so where the catalogue puts them in a family.
The prior means and spreads are the catalogue's; how strong interactions are, and how far the catalogue may be off, is
told by the likelihood of the measurements: several assumptions are kept, each with the share that they give it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from worker.plan.grid import Floats, Rows, look_up

LEVEL = 1.0  # standard deviation of the level that all configurations share
UNIT = 0.15  # unit of `pairs`: two choices of spread UNIT have a pair of spread `pairs` x UNIT
LEAST_SHARE = 0.01  # of an assumption that is kept
# Least spread of a choice in pairs and triples: what does nothing by itself may still do something with another.
INTERACTING = 0.1
ALIKE = 0.5  # correlation of two choices of one lever: what leaves the baseline's choice tends to do the same
FAMILY = 0.7  # correlation of two choices of one family, such as two kinds of autocast
TRIPLES = 0.5  # how strong triples are: of the square of pairs' strength


@dataclass(frozen=True)
class Assumption:
    """A factor on the catalogue's spreads, and how strong pairs are.

    `against` is subtracted from its log-likelihood: so much more the measurements have to speak for it.
    """

    factor: float
    pairs: float
    against: float


ASSUMPTIONS = tuple(
    Assumption(*one) for one in ((0.8, 0.3, 0.5), (1.3, 0.3, 0.0), (1.3, 0.6, 0.5), (2.0, 0.4, 1.0), (2.0, 0.8, 1.5))
)


class HasPrior(Protocol):
    """What is expected before anything is measured: `spread` and `families` are tables of the grid."""

    spread: Floats
    families: Floats

    def expected(self, rows: Rows) -> Floats:
        """The expected logarithm of each row's value, up to a constant."""


class Kernels:
    """The covariances of two configurations' logarithms under several assumptions.

    `spread` and `families` are the prior's tables. What the assumptions have in common is computed once.
    """

    def __init__(self, spread: Floats, families: Floats, assumptions: Sequence[Assumption]) -> None:
        self._spread, self._families, self._assumptions = spread, families, assumptions
        # By factor, and in units of it: the spreads of choices in pairs and triples. What is sure to do nothing alone
        # does nothing there either.
        self._interacting = {
            one.factor: np.where(spread > 0, np.maximum(spread, INTERACTING / one.factor), 0.0) for one in assumptions
        }

    def between(self, ones: Rows, others: Rows) -> list[Floats]:
        """The covariances under each assumption, of shape (ones, others)."""
        mine, theirs = look_up(self._families, ones)[:, None, :], look_up(self._families, others)[None, :, :]
        alike = np.where((mine == theirs) & (mine > 0), FAMILY, ALIKE)
        alike = np.where(ones[:, None, :] == others[None, :, :], 1.0, alike)

        def shared(spread: Floats) -> Floats:
            found: Floats = look_up(spread, ones)[:, None, :] * look_up(spread, others)[None, :, :] * alike
            return found

        return self._sums(shared)

    def diagonal(self, rows: Rows) -> list[Floats]:
        """The variance of each row under each assumption."""
        return self._sums(lambda spread: look_up(spread, rows) ** 2)

    def _sums(self, shared: Callable[[Floats], Floats]) -> list[Floats]:
        """Level, single choices, pairs and triples; `shared` gives the variances that columns, the last axis, share.

        The sums over all pairs and triples follow from power sums (Newton's identities).
        """
        single = shared(self._spread).sum(axis=-1)
        together = {factor: _pairs_and_triples(shared(spread)) for factor, spread in self._interacting.items()}
        found = []
        for one in self._assumptions:
            (pairs, triples), strength = together[one.factor], (one.pairs * one.factor / UNIT) ** 2
            interacting = strength * pairs + (TRIPLES * strength / one.factor) ** 2 * triples
            found.append(LEVEL**2 + one.factor**2 * single + interacting)
        return found


def _pairs_and_triples(variances: Floats) -> tuple[Floats, Floats]:
    """(the sum over all pairs of columns of their product, that over all triples)."""
    squares = variances * variances
    first, second = variances.sum(axis=-1), squares.sum(axis=-1)
    third = np.einsum("...i,...i->...", squares, variances)
    return (first**2 - second) / 2, (first**3 - 3 * first * second + 2 * third) / 6


class Surrogate:
    """Predicts the logarithm of the seconds of any row, with a standard deviation, from measured rows."""

    def __init__(self, prior: HasPrior, rows: Rows, values: Floats, noise: Floats) -> None:
        self._prior, self._rows = prior, rows
        self._level = float(np.mean(values - prior.expected(rows)))
        residuals = values - self._expected(rows)
        kernels = Kernels(prior.spread, prior.families, ASSUMPTIONS)
        fits = [_Fit(covariance, residuals, noise) for covariance in kernels.between(rows, rows)]
        likelihoods = np.array([fit.likelihood - one.against for fit, one in zip(fits, ASSUMPTIONS, strict=True)])
        shares = np.exp(likelihoods - likelihoods.max())
        shares = np.where(shares < LEAST_SHARE * shares.sum(), 0.0, shares)
        kept = [at for at, share in enumerate(shares) if share > 0]
        self._fits = [(fits[at], shares[at] / shares.sum()) for at in kept]
        self._kernels = Kernels(prior.spread, prior.families, [ASSUMPTIONS[at] for at in kept])

    def _expected(self, rows: Rows) -> Floats:
        return self._level + self._prior.expected(rows)

    def predict(self, rows: Rows) -> tuple[Floats, Floats]:
        """(expected logarithm of the seconds, its standard deviation without a measurement's noise) of each row."""
        mean, square = np.zeros(len(rows)), np.zeros(len(rows))
        covariances = zip(self._kernels.between(rows, self._rows), self._kernels.diagonal(rows), strict=True)
        for (fit, share), (across, own) in zip(self._fits, covariances, strict=True):
            expected = across @ fit.weights
            solved = np.linalg.solve(fit.factor, across.T)
            variance = np.maximum(own - (solved**2).sum(axis=0), 1e-10)
            mean += share * expected
            square += share * (variance + expected**2)
        return self._expected(rows) + mean, np.sqrt(np.maximum(square - mean**2, 1e-10))


class _Fit:
    """The Cholesky factor of the measured rows' covariance with their noise, and the likelihood of the measurements."""

    def __init__(self, covariance: Floats, residuals: Floats, noise: Floats) -> None:
        covariance = covariance + np.diag(noise**2)
        self.factor = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(residuals)))
        half = np.linalg.solve(self.factor, residuals)
        self.weights = np.linalg.solve(self.factor.T, half)
        self.likelihood = float(-0.5 * half @ half - np.log(np.diag(self.factor)).sum())


def cumulative(values: Floats) -> Floats:
    """The standard normal distribution's cumulative probability."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])

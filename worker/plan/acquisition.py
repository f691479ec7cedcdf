"""What untried configurations promise: the expected improvement over the best so far, by the surrogate's predictions.

That is the mean improvement over the surrogate's distribution of a configuration's seconds (Jones et al. 1998,
"Efficient Global Optimization"), times the probability that the configuration runs to its end.
"""

from __future__ import annotations

import math

import numpy as np

from service.contract.configuration import Configuration
from service.contract.measurement import Measurement, Outcome
from service.contract.objective import (
    counted_seconds,
    counts_once,
    evaluating_seconds,
    least_disturbed,
    training_seconds,
)
from service.levers import as_fixed
from worker.plan.feasibility import Feasibility
from worker.plan.grid import Floats, Grid, Rows, look_up
from worker.plan.prior import Prior, short_of_memory
from worker.plan.space import inside
from worker.plan.surrogate import Surrogate, cumulative
from worker.plan.view import View

WORTH = 0.005  # share of the seconds: a smaller improvement counts as none
WORTH_TELLING = 0.001  # share of the seconds that a choice which was in no trial has to promise, to be tried first
LEAST_NOISE = 0.01  # standard deviation of the logarithm of a trial's seconds, at least
# The same standard deviation for earlier jobs' trials: of the same job, and of another job on the same hardware.
SAME_NOISE, LIKE_NOISE = 0.015, 0.2
# Added for a trial at a given micro batch: it might be faster or slower at another one, for no reason in its levers.
PINNED_NOISE = 0.1
# Weight of the logarithm of memory saved beside that of the seconds, while nothing has run: where a trial fitted at no
# micro batch, and where only the baseline failed, at the micro batch that it was given.
SAVING, SAVING_AT_FIRST = 0.7, 0.15
# Weight of the logarithm of seconds beside that of the chance to run, where nothing ran and so many trials failed that
# little but that chance matters.
LITTLE = 0.2
BEST = 2  # configurations whose neighbours are looked at
# In two trials of four the second of them differs from the first in at least LEVERS_APART levers
# (docs/decisions/0040); where memory is short, only once ENOUGH_RAN trials have run.
LEVERS_APART, ENOUGH_RAN = 3, 8
MOST = 40  # configurations that `best` returns
ROUNDS = 12  # steps of a leap, at most
HOPELESS = -14.0  # log chance that a leap gives rows which cannot run, as the way to one that can may lead over them


class Acquisition:
    """Looks at the configurations around the best so far, and at the one that is expected to be the fastest of all."""

    def __init__(self, view: View) -> None:
        ran = [
            one for one in view.history if one.outcome is Outcome.ok and math.isfinite(counted_seconds(view.spec, one))
        ]
        waiting = [one.configuration for one in view.under_way if one.configuration.method == view.method]
        seen = [*(one.configuration for one in view.history), *waiting]
        earlier = [one.configuration for one in view.earlier]
        self._grid = Grid(view.spec, view.method, view.choices, view.effectives, [*seen, *earlier])
        self._saving = _saving(view)
        self._prior, self._feasibility = Prior(view, self._grid), Feasibility(view, self._grid)
        self._taken = {tuple(self._grid.encode(one)) for one in seen if one.micro_batch_size is None}
        counts = counts_once(view.spec)
        beside = (one.load_seconds + evaluating_seconds(view.spec, one) for one in ran)
        self._fixed_seconds = min(beside, default=0.0) if counts else 0.0
        own = [one for one in ran if one.configuration.micro_batch_size is None or one is view.baseline()]
        # The predictions are fitted first: what is to be improved and the leaps are computed from them.
        self._surrogate: Surrogate | None = None
        if own:
            self._fit(view, own, waiting)
        self._tried_choices = self._grid.table({})  # 1 where a trial that ran or is under way has the choice
        for one in [*(one.configuration for one in ran), *waiting]:
            self._tried_choices[np.arange(len(self._grid.names)), self._grid.encode(one)] = 1.0
        best = self._best(view, own)
        self._is_first = not best  # nothing of the space ran yet
        self._threshold = self._least_so_far(view, own, best)
        self._anchors = best or self._nearest_to_first(view)
        self._leaps = [self._leap(row) for row in self._anchors]

    def _fit(self, view: View, ran: list[Measurement], waiting: list[Configuration]) -> None:
        """Set all that rows are predicted by, of which there is nothing before a trial ran."""
        self._surrogate = self._fitted(view, ran, waiting)

    def _fitted(self, view: View, ran: list[Measurement], waiting: list[Configuration]) -> Surrogate:
        """The surrogate, fitted to all that ran. Trials under way enter with the surrogate's own prediction.

        An earlier job's trial enters as its ratio to that job's baseline, times this job's baseline: with little noise
        if it was the same job, and with much if only hardware, task and method are the same.
        """
        configurations = [one.configuration for one in ran]
        values = [math.log(self._training(view, one)) for one in ran]
        alone = {one.configuration.key for one in ran}
        noise = [
            _noise(one) + (0.0 if one.configuration.at_micro_batch(None).key in alone else PINNED_NOISE) for one in ran
        ]
        if reference := view.baseline():
            level = math.log(training_seconds(view.spec, reference))
            for one in view.earlier:
                configurations.append(one.configuration)
                values.append(level + math.log(one.ratio))
                noise.append(SAME_NOISE if view.repeats(one) else LIKE_NOISE)
        made = self._surrogate_of(configurations, values, noise)
        if not waiting:
            return made
        expected = made.predict(np.array([self._grid.encode(one) for one in waiting]))[0]
        return self._surrogate_of(
            [*configurations, *waiting], [*values, *expected.tolist()], [*noise, *[LEAST_NOISE] * len(waiting)]
        )

    def _training(self, view: View, measured: Measurement) -> float:
        """The seconds of training, which the surrogate is fitted to."""
        return training_seconds(view.spec, measured)

    def _surrogate_of(self, configurations: list[Configuration], values: list[float], noise: list[float]) -> Surrogate:
        rows = np.array([self._grid.encode(one) for one in configurations])
        return Surrogate(self._prior, rows, np.array(values), np.array(noise))

    def _best(self, view: View, ran: list[Measurement]) -> list[Rows]:
        """The best rows of those that ran; none where none in the space has."""
        mine = [one for one in least_disturbed(ran) if inside(one.configuration, view.choices, view.spec.task)]
        mine = [one for one in mine if as_fixed(view.spec, one.configuration)]

        def order(one: Measurement) -> tuple[float, float]:
            return view.score(one), counted_seconds(view.spec, one)

        # Where nothing near the best is better, something better may be near another good configuration. Where memory
        # is short, few have run at first, and what is far from the best of these is not good yet.
        is_early = short_of_memory(view) and len(ran) < ENOUGH_RAN
        looks_far = not is_early and len(view.history) % 4 >= 2
        ordered = [self._grid.encode(one.configuration) for one in sorted(mine, key=order)]
        return first_apart(ordered, BEST, LEVERS_APART if looks_far else 1)

    def _least_so_far(self, view: View, ran: list[Measurement], best: list[Rows]) -> float:
        """The logarithm of the seconds that are to be improved: the least that are predicted for the best rows.

        Where there are none, it is the least for all that ran; 0 where nothing did.
        """
        if self._surrogate is None:
            return 0.0
        known = np.array(best or [self._grid.encode(one.configuration) for one in ran])
        return float(self._run(known)[0].min())

    def _nearest_to_first(self, view: View) -> list[Rows]:
        """The row of the space nearest to the job's first trial, which is the baseline; none before that has ended."""
        first = view.history[0].configuration if view.history else None
        return [self._grid.nearest(self._grid.encode(first))] if first else []

    def best(self, switches: int) -> list[tuple[Configuration, float]]:
        """(a configuration that was not tried, the share of the seconds that it promises to save), best first.

        `switches` says in how many levers, at most, the neighbours of the best so far differ from it.
        """
        rows, promise = self._found(switches)
        order = [at for at in np.argsort(-promise, kind="stable") if promise[at] > -math.inf]
        found = ((self._grid.decode(rows[at]), math.exp(promise[at])) for at in order[:MOST])
        return [(configuration, promised) for configuration, promised in found if configuration]

    def left(self) -> float:
        """The share of the seconds that switching single levers of the best promises to save, all levers together.

        What different levers save adds up, so it is the sum of what the most promising switch of each lever promises.
        The best itself is added where it was tried only at a given micro batch, and not at the fastest one for it.
        """
        if not self._anchors:
            return 0.0
        rows = np.vstack([self._anchors[0], self._grid.neighbours(self._anchors[0])])
        switched = rows != self._anchors[0]
        promised, lever = np.exp(self._promise(rows)), np.where(switched.any(axis=1), switched.argmax(axis=1), -1)
        return float(sum(promised[lever == one].max() for one in np.unique(lever)))

    def _found(self, switches: int) -> tuple[Rows, Floats]:
        """(rows that are worth a trial, what each promises): neighbours of the best, and a leap from each of them.

        A leap goes on from neighbour to neighbour as long as a faster one is expected, so that it takes all choices
        that are expected to help. Where nothing of the space ran yet, the neighbours of its end are looked at as well.

        Of single switches, those to a choice that was in no trial yet come first, as long as one of them is worth it:
        most searches miss what such a choice does, because the model is always unsure of how known choices interact.
        """
        if not self._anchors:
            return np.empty((0, len(self._grid.names)), dtype=np.int64), np.empty(0)
        centres = [*self._anchors, *(leap[-1] for leap in self._leaps if self._is_first)]
        near = [self._grid.neighbours(row, switches) for row in centres]
        rows = np.unique(np.vstack([*near, *self._leaps]), axis=0)
        promise = self._promise(rows)
        if switches == 1:
            is_new = np.any(look_up(self._tried_choices, rows) == 0.0, axis=1)
            if np.any(promise[is_new] >= math.log(WORTH_TELLING)):
                promise = np.where(is_new, promise, -math.inf)
        return rows, promise

    def _promise(self, rows: Rows) -> Floats:
        """The logarithm of what each row promises; minus infinity for what was tried or cannot fit."""
        chance = self._chance(rows)
        if self._surrogate is None or self._is_first:
            # Nothing of the space ran yet: what is expected to be fast comes first, and while nothing ran, what runs.
            found = chance + self._threshold - self._expected(rows)
        else:
            mean, deviation = self._run(rows)
            found = chance + log_improvement(self._threshold - WORTH - mean, deviation)
        tried = np.array([tuple(row) in self._taken for row in rows])
        return np.where(tried, -math.inf, found)

    def _chance(self, rows: Rows) -> Floats:
        """The logarithm of the chance that each row runs to its end; minus infinity where it cannot."""
        found: Floats = np.log(np.maximum(self._feasibility.chance(rows), 1e-12))
        return np.where(self._feasibility.impossible(rows), -math.inf, found)

    def _expected(self, rows: Rows) -> Floats:
        """The expected logarithm of each row's seconds; while nothing fits, what saves memory or fits comes first."""
        if self._surrogate:
            return self._run(rows)[0]
        if self._feasibility.learns:
            return LITTLE * self._prior.expected(rows)
        return self._prior.expected(rows) - self._saving * self._feasibility.saved(rows)

    def _run(self, rows: Rows) -> tuple[Floats, Floats]:
        """(expected logarithm of the whole run's seconds, its standard deviation): training and what is done once."""
        assert self._surrogate is not None
        mean, deviation = self._surrogate.predict(rows)
        training, once = np.exp(mean), self._fixed_seconds + self._prior.once(rows)
        return np.log(training + once), deviation * training / (training + once)

    def _leap(self, row: Rows) -> Rows:
        """A greedy walk from a row, each time to its fastest neighbour by up to two switches, until none is faster."""
        kept, at = [row], math.inf
        for _ in range(ROUNDS):
            near = self._grid.neighbours(row, 2)
            if not len(near):
                break
            expected = self._expected(near) - np.maximum(self._chance(near), HOPELESS)
            if expected.min() >= at:
                break
            at, row = float(expected.min()), near[int(expected.argmin())]
            kept.append(row)
        return np.array(kept)


def _saving(view: View) -> float:
    """The weight of memory saved beside seconds, while nothing has run."""
    return SAVING if short_of_memory(view) else SAVING_AT_FIRST if view.history else 0.0


def first_apart(rows: list[Rows], most: int, switches: int) -> list[Rows]:
    """The first rows, at most `most`, each of which differs from those before it in `switches` columns or more."""
    found: list[Rows] = []
    for row in rows:
        if len(found) < most and all((row != one).sum() >= switches for one in found):
            found.append(row)
    return found


def log_improvement(gain: Floats, deviation: Floats) -> Floats:
    """The logarithm of the expected improvement where the gain is normal with that mean and standard deviation."""
    score = gain / deviation
    density = np.exp(-0.5 * score**2) / math.sqrt(2 * math.pi)
    plain = density + score * cumulative(score)
    # Far below, where the difference above is lost to rounding: the first term of the asymptotic series.
    series = -0.5 * score**2 - 0.5 * math.log(2 * math.pi) - 2 * np.log(np.maximum(-score, 1.0))
    found: Floats = np.log(deviation) + np.where(score < -5.0, series, np.log(np.maximum(plain, 1e-300)))
    return found


def _noise(measurement: Measurement) -> float:
    """The standard deviation of the logarithm of a trial's seconds, by its timing's interval."""
    return max(LEAST_NOISE, measurement.timing.log_error) if measurement.timing else LEAST_NOISE

"""Searches to compare: each takes a surface, a count of trials and a seed, and gives the trials in their order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from benchmarks.surfaces.base import Surface
from benchmarks.surfaces.recipes import recipes
from service.contract.configuration import Configuration
from service.contract.measurement import Measurement, Outcome
from service.contract.objective import score
from service.contract.task import PlanDecision, PlanInput, TrialRecord, TrialRequest
from service.levers import LEVERS, circumstances, excluded
from service.space import Space, applicable, space, without
from worker.child.curve import GIVEN_UP
from worker.child.timing import LEAST_TIMED_SECONDS
from worker.plan import plan
from worker.plan.grid import EFFECTIVE
from worker.plan.proposers.baseline import baseline
from worker.plan.space import effective_choices, make
from worker.plan.view import View

Policy = Callable[[Surface, int, int], list[Configuration]]
MOST_DRAWS = 100_000  # of a random configuration that is valid
MOST_INVALID = 60  # suggestions of the sampler in a row, before a random configuration is taken
WORSE = 2.0  # times the worst good score: what the sampler is told of a failed trial


def measured_score(surface: Surface, configuration: Configuration, seed: int) -> float:
    """The score that a trial would report; infinite where it does not run to its end."""
    found = surface.measure(configuration, seed)
    return score(surface.spec, found) if found.outcome is Outcome.ok else math.inf


class Bounds:
    """What a policy that does not plan knows of a job: its space, its effective batches and its baseline."""

    def __init__(self, surface: Surface) -> None:
        self.spec, self.method = surface.spec, surface.spec.method[0]
        self.choices: Space = applicable(
            without(space(self.spec, surface.facts), surface.lacks), self.method, self.spec.task
        )
        self.effectives = effective_choices(self.spec, surface.rows)
        self.baseline = baseline(self.spec, self.method, {})[0]
        self._circumstances = circumstances(self.spec, self.method)

    def valid(self, levers: dict[str, str]) -> bool:
        """Whether no exclusion forbids these choices."""
        return excluded({**levers, **self._circumstances}) is None

    def make(self, levers: dict[str, str], effective: int) -> Configuration | None:
        """The configuration, or None where it is excluded."""
        return make(self.spec, self.method, levers, effective)

    def draw(self, rng: random.Random, taken: set[str]) -> Configuration | None:
        """A valid configuration drawn uniformly; None where none is found that is new."""
        for _ in range(MOST_DRAWS):
            levers = {name: rng.choice(options) for name, options in self.choices.items()}
            if not self.valid(levers):
                continue
            made = self.make(levers, rng.choice(self.effectives))
            if made is not None and made.key not in taken:
                return made
        return None

    def inside(self, configuration: Configuration) -> dict[str, str]:
        """A configuration's choices; where one is not in the space, as the baseline's may be, the lever's first."""
        return {
            name: choice if choice in self.choices[name] else self.choices[name][0]
            for name, choice in configuration.levers.items()
        }

    def changed(self, configuration: Configuration) -> list[Configuration]:
        """Every valid configuration that differs by one choice, levers in the catalogue's order."""
        inside, size = self.inside(configuration), configuration.effective_batch_size
        found = [
            self.make({**inside, name: choice}, size)
            for name, options in self.choices.items()
            for choice in options
            if choice != configuration.levers[name]
        ]
        found += [self.make(inside, one) for one in self.effectives if one != size]
        return [one for one in found if one is not None]


def searched(known: PlanInput, surface: Surface, seed: int, trials: float = math.inf) -> tuple[PlanInput, PlanDecision]:
    """(what is known at the end of the planner's search, its last decision): one worker, and at most so many trials.

    The search ends early where the plan asks for the verification.
    """
    while True:
        decision = plan(known)
        if not decision.trials or len(known.history) >= trials:
            return known, decision
        records = tuple(
            TrialRecord(request=request, measurement=_given_up(surface.measure(request.configuration, seed), request))
            for request in decision.trials
        )
        spent = sum(sum(one.measurement.time_spent.values()) for one in records)
        known = known.model_copy(
            update={
                "history": (*known.history, *records),
                "next_number": known.next_number + len(records),
                "elapsed_seconds": known.elapsed_seconds + spent,
            }
        )


def _given_up(measured: Measurement, request: TrialRequest) -> Measurement:
    """The measurement, whose trial took less time where the worker gives up what is clearly slower."""
    seconds = measured.timing.seconds if measured.timing else 0.0
    if request.best_seconds is None or seconds <= GIVEN_UP * request.best_seconds:
        return measured
    return measured.model_copy(
        update={"time_spent": {**measured.time_spent, "timing": min(seconds, LEAST_TIMED_SECONDS)}}
    )


def dynotune(surface: Surface, trials: int, seed: int) -> list[Configuration]:
    """The planner."""
    search = surface.spec.search.model_copy(update={"seed": seed})
    known = PlanInput(spec=surface.spec.model_copy(update={"search": search}), facts=surface.facts)
    return [one.request.configuration for one in searched(known, surface, seed, trials)[0].history[:trials]]


def at_random(surface: Surface, trials: int, seed: int) -> list[Configuration]:
    """The baseline, then valid configurations drawn uniformly."""
    bounds, rng = Bounds(surface), random.Random(seed)
    found = [bounds.baseline]
    return _filled(bounds, found, trials, rng)


def _filled(bounds: Bounds, found: list[Configuration], trials: int, rng: random.Random) -> list[Configuration]:
    """The trials, with random ones to the wanted count."""
    taken = {one.key for one in found}
    while len(found) < trials:
        made = bounds.draw(rng, taken)
        if made is None:
            break
        found.append(made)
        taken.add(made.key)
    return found


def tpe(surface: Surface, trials: int, seed: int) -> list[Configuration]:
    """Optuna's TPE alone. Invalid suggestions are told as pruned and are no trials; failures as twice the worst."""
    bounds, rng = Bounds(surface), random.Random(seed)
    found, taken = [bounds.baseline], {bounds.baseline.key}
    distributions = {name: CategoricalDistribution(options) for name, options in bounds.choices.items()}
    distributions[EFFECTIVE] = CategoricalDistribution(bounds.effectives)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    worst = measured_score(surface, bounds.baseline, seed)
    worst = worst if math.isfinite(worst) else 0.0
    while len(found) < trials:
        made, trial = _suggested(study, distributions, bounds, taken)
        made = made or bounds.draw(rng, taken)
        if made is None:
            break
        value = measured_score(surface, made, seed)
        worst = max(worst, value) if math.isfinite(value) else worst
        if trial is not None:
            study.tell(trial, value if math.isfinite(value) else WORSE * (worst or 1.0))
        found.append(made)
        taken.add(made.key)
    return found


def _suggested(
    study: optuna.Study, distributions: dict[str, CategoricalDistribution], bounds: Bounds, taken: set[str]
) -> tuple[Configuration | None, optuna.trial.Trial | None]:
    """(the sampler's next valid and new configuration, its trial), or none after many suggestions."""
    for _ in range(MOST_INVALID):
        trial = study.ask(dict(distributions))
        levers = {name: str(trial.params[name]) for name in bounds.choices}
        made = bounds.make(levers, int(trial.params[EFFECTIVE])) if bounds.valid(levers) else None
        if made is not None and made.key not in taken:
            return made, trial
        study.tell(trial, state=TrialState.PRUNED)
    return None, None


def listed(surface: Surface) -> list[Configuration]:
    """The baseline and the recipes."""
    bounds = Bounds(surface)
    view = View(PlanInput(spec=surface.spec, facts=surface.facts), bounds.method)
    found = recipes(view, bounds.effectives[min(1, len(bounds.effectives) - 1)])
    return list({one.key: one for one in (bounds.baseline, *found)}.values())


def by_recipes(surface: Surface, trials: int, seed: int) -> list[Configuration]:
    """The baseline, the recipes, then random single changes of the best."""
    bounds, rng = Bounds(surface), random.Random(seed)
    found = listed(surface)[:trials]
    while len(found) < trials:
        taken = {one.key for one in found}
        order = sorted(found, key=lambda one: (measured_score(surface, one, seed), one.key))
        left: list[Configuration] = []
        for best in order:
            left = [one for one in bounds.changed(best) if one.key not in taken]
            if left:
                break
        if not left:
            break
        found.append(rng.choice(left))
    return found


def coordinate(surface: Surface, trials: int, seed: int) -> list[Configuration]:
    """Coordinate descent from the baseline: levers in the catalogue's order, improvements are kept."""
    bounds = Bounds(surface)
    found, taken = [bounds.baseline], {bounds.baseline.key}
    levers, effective, best = bounds.inside(bounds.baseline), bounds.baseline.effective_batch_size, math.inf
    while len(found) < trials:
        before = len(found)
        for name in (*LEVERS, EFFECTIVE):
            for made in _along(bounds, levers, effective, name):
                if made.key in taken or len(found) >= trials:
                    continue
                found.append(made)
                taken.add(made.key)
                value = measured_score(surface, made, seed)
                if value < best:
                    levers, effective, best = made.levers, made.effective_batch_size, value
        if len(found) == before:
            break
    return found


def _along(bounds: Bounds, levers: dict[str, str], effective: int, name: str) -> list[Configuration]:
    """The configurations with each choice of one lever; excluded ones are left out."""
    if name == EFFECTIVE:
        made = [bounds.make(levers, one) for one in bounds.effectives]
    else:
        made = [bounds.make({**levers, name: choice}, effective) for choice in bounds.choices[name]]
    return [one for one in made if one is not None]


POLICIES: dict[str, Policy] = {
    "dynotune": dynotune,
    "random": at_random,
    "tpe": tpe,
    "recipes": by_recipes,
    "coordinate": coordinate,
}

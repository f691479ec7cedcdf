"""Optuna, replayed: the history into an in-memory study, then `ask`. The same seed and history, the same answer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from service.contract.configuration import Configuration
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement, Outcome
from worker.plan.space import Space, applicable, every, make, repaired

MOST_ASKS = 16
MOST_LISTED = 10_000
MOST_DRAWN = 200
WORSE = 2.0
EFFECTIVE = "effective_batch_size"

optuna.logging.set_verbosity(optuna.logging.WARNING)


def ask(
    spec: JobSpec,
    method: Method,
    choices: Space,
    effectives: tuple[int, ...],
    history: list[Measurement],
    under_way: list[Configuration],
    taken: set[str],
    score: Callable[[Measurement], float],
) -> Configuration | None:
    """The next configuration by TPE (Bergstra et al. 2011), or None when everything valid has been tried.

    `history` is in finish order. What failed is told as twice the worst, so that the sampler keeps away from it;
    what is under way counts as no better than the median (constant liar). An ask that is invalid or taken is
    told FAIL before the next.
    """
    choices = applicable(choices, method, spec.task)
    distributions: dict[str, CategoricalDistribution] = {
        name: CategoricalDistribution(options) for name, options in choices.items()
    }
    distributions[EFFECTIVE] = CategoricalDistribution(effectives)
    sampler = optuna.samplers.TPESampler(seed=spec.search.seed, n_startup_trials=5, multivariate=True)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    good = sorted(score(one) for one in history if one.outcome is Outcome.ok)
    if not good:
        good = [1.0]
    told = [(one.configuration, score(one) if one.outcome is Outcome.ok else WORSE * good[-1]) for one in history]
    told += [(configuration, good[len(good) // 2]) for configuration in under_way]
    for configuration, value in told:
        parameters = {**configuration.levers, EFFECTIVE: configuration.effective_batch_size}
        if all(parameters[name] in distribution.choices for name, distribution in distributions.items()):
            study.add_trial(create_trial(params=parameters, distributions=distributions, value=value))
    for _ in range(MOST_ASKS):
        trial = study.ask(distributions)
        levers = repaired(spec, method, {name: str(trial.params[name]) for name in choices}, choices)
        made = make(spec, method, levers, int(trial.params[EFFECTIVE]))
        if made is not None and made.key not in taken:
            return made
        study.tell(trial, state=TrialState.FAIL)
    return _any_left(spec, method, choices, effectives, taken)


def _any_left(
    spec: JobSpec, method: Method, choices: Space, effectives: tuple[int, ...], taken: set[str]
) -> Configuration | None:
    """TPE has narrowed down to what is taken: one of the rest at random, or None when there is none to be found."""
    if math.prod(map(len, choices.values())) > MOST_LISTED:
        rng = random.Random(spec.search.seed + len(taken))
        for _ in range(MOST_DRAWN):
            drawn = {name: rng.choice(options) for name, options in choices.items()}
            made = make(spec, method, repaired(spec, method, drawn, choices), rng.choice(effectives))
            if made is not None and made.key not in taken:
                return made
        return None
    left = [one for one in every(spec, method, choices, effectives) if one.key not in taken]
    return random.Random(spec.search.seed + len(taken)).choice(left) if left else None

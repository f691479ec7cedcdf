"""The sampler: an Optuna study in memory is told the history, and asked for a trial. It is seeded, so it is pure.

It is for jobs of which nothing has run, and for which the surrogate has ruled out all that it looks at: what it takes
for impossible may yet run, as the catalogue's memory factors are no measurements. Where memory was short, only choices
that need about the least of it are drawn: what holds more than what did not fit is no news.
"""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from service.contract.configuration import Configuration
from service.contract.states import Origin
from service.space import Space, applicable
from worker.plan.grid import EFFECTIVE, Grid
from worker.plan.memory_needs import memory_tables
from worker.plan.prior import short_of_memory
from worker.plan.proposers import Proposal
from worker.plan.space import make, repaired
from worker.plan.view import View

MOST_ASKS = 16  # of the sampler, before a random configuration is taken
MOST_DRAWN = 200  # random draws before all combinations are listed
MOST_LISTED = 10_000  # combinations that are listed at most
MOST_UNAFFORDABLE = 8  # configurations for which there is no time, before the proposer gives up
FAILED = 1.0  # what the sampler is told of a failed trial
# How much more memory than the least of a lever's choices still counts as about as little: in the logarithm of
# activations' bytes, in bytes of optimizer state for each trained weight, and in bytes for each weight.
SLACK = (math.log(1.4), 0.5, 0.1)

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Search:
    """Proposes what the sampler suggests while nothing has run, if there is time for it."""

    order, always = 30, False

    def propose(self, view: View) -> Proposal | None:
        """The sampler's next configuration for which there is time: one that compiles may take longer than is left."""
        if view.good:
            return None
        taken = set(view.taken)
        for _ in range(MOST_UNAFFORDABLE):
            found = ask(view, taken)
            if found is None:
                return None
            if view.budget.affords(found):
                return Proposal(found, Origin.search)
            taken.add(found.key)
        return None


def ask(view: View, taken: set[str]) -> Configuration | None:
    """The next configuration by TPE (Bergstra et al. 2011), or None when everything valid has been tried.

    Nothing has run, so the sampler is told that all that failed is equally bad. A suggestion that is invalid or was
    tried before is told as FAIL.
    """
    spec, method, effectives = view.spec, view.method, view.effectives
    everything = applicable(view.choices, method, spec.task)
    choices = _slim(view, everything) if short_of_memory(view) else everything
    distributions: dict[str, CategoricalDistribution] = {
        name: CategoricalDistribution(options) for name, options in choices.items()
    }
    distributions[EFFECTIVE] = CategoricalDistribution(effectives)
    sampler = optuna.samplers.TPESampler(seed=spec.search.seed, n_startup_trials=5, multivariate=True)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    for one in view.history:
        parameters = {**one.configuration.levers, EFFECTIVE: one.configuration.effective_batch_size}
        if all(parameters[name] in distribution.choices for name, distribution in distributions.items()):
            study.add_trial(create_trial(params=parameters, distributions=distributions, value=FAILED))
    for _ in range(MOST_ASKS):
        trial = study.ask(distributions)
        levers = _repaired(view, {name: str(trial.params[name]) for name in choices}, choices, everything)
        made = make(spec, method, levers, int(trial.params[EFFECTIVE]))
        if made is not None and made.key not in taken:
            return made
        study.tell(trial, state=TrialState.FAIL)
    return _any_left(view, choices, everything, taken)


def _slim(view: View, choices: Space) -> Space:
    """The choices of each lever that need about the least memory, by what the catalogue says of them.

    Those of two levers may all exclude each other, so that one of the two has to go back to its baseline.
    """
    grid = Grid(view.spec, view.method, choices, view.effectives, [])
    tables = memory_tables(view, grid)
    found = {}
    for at, name in enumerate(grid.names):
        if name not in choices:
            continue
        needs = [table[at, : len(choices[name])] for table in tables]
        kept = np.all([one <= one.min() + slack for one, slack in zip(needs, SLACK, strict=True)], axis=0)
        found[name] = tuple(choice for choice, keeps in zip(choices[name], kept, strict=True) if keeps)
    return {name: found[name] or choices[name] for name in choices}


def _repaired(view: View, levers: dict[str, str], choices: Space, everything: Space) -> dict[str, str]:
    """The levers, those that exclude each other set back to their baselines.

    That is to a baseline among `choices` where there is one, and else to one that only `everything` has.
    """
    found = repaired(view.spec, view.method, levers, choices)
    return repaired(view.spec, view.method, found, everything)


def _any_left(view: View, choices: Space, everything: Space, taken: set[str]) -> Configuration | None:
    """A random configuration that was not tried, where the sampler suggests only tried ones; None if none is left."""
    spec, method, effectives = view.spec, view.method, view.effectives
    rng = random.Random(spec.search.seed + len(taken))
    for _ in range(MOST_DRAWN):
        drawn = {name: rng.choice(options) for name, options in choices.items()}
        made = make(spec, method, _repaired(view, drawn, choices, everything), rng.choice(effectives))
        if made is not None and made.key not in taken:
            return made
    if math.prod(map(len, choices.values())) > MOST_LISTED:
        return None
    left: dict[str, Configuration] = {}
    for combination in product(*choices.values()):
        levers = _repaired(view, dict(zip(choices, combination, strict=True)), choices, everything)
        of_sizes = (make(spec, method, levers, size) for size in effectives)
        left |= {one.key: one for one in of_sizes if one is not None and one.key not in taken}
    return rng.choice(list(left.values())) if left else None


PROPOSER = Search()

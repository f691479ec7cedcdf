"""The surrogate's proposal: the configuration that promises most, by what the job's trials say of all others.

Before anything was measured beside the baseline that is the combination of all that the catalogue expects to help. Each
measurement then corrects what is expected of its choices (worker/plan/surrogate.py), and what is expected to run at all
(worker/plan/feasibility.py). Where minutes end the search, what a configuration promises counts by the second of its
trial (Snoek et al. 2012, "Practical Bayesian Optimization"): code that compiles for minutes has to promise more.
"""

from __future__ import annotations

from collections.abc import Iterator

from service.contract.configuration import Configuration
from service.contract.states import Origin
from worker.plan.acquisition import Acquisition
from worker.plan.least_memory import MemoryAcquisition
from worker.plan.proposers import Proposal, first_affordable, micro_batches
from worker.plan.proposers.ablation import kept_for_ablation
from worker.plan.view import View

# Shares of the seconds. The search goes on while the levers that were not switched at the best yet promise to save
# LEAST_LEFT, all of them together: to stop when no single trial promises much would leave a dozen choices untried, each
# of little promise, of which one may be good. Where the same job was searched before, a trial alone has to promise
# ENOUGH_AGAIN.
LEAST_LEFT, ENOUGH_AGAIN = 0.01, 0.02


class ExpectedImprovement:
    """Proposes the configuration of the greatest expected improvement that there is time for."""

    order, always = 20, False

    def propose(self, view: View) -> Proposal | None:
        """The most promising configuration, or None when none promises enough.

        The last trials of a budget are left to the proposers after it.
        """
        if view.trials_left() <= kept_for_ablation(view) + len(micro_batches.pending(view)):
            return None
        return first_affordable(view, promising(view), Origin.search)


def promising(view: View) -> Iterator[Configuration]:
    """The configurations that promise enough to be tried, the most promising for what their trial costs first.

    In turns it looks at configurations with one switch and with up to two: single ones tell best what a choice does,
    and some choices only help in pairs.
    """
    acquisition = (MemoryAcquisition if view.minimises_memory else Acquisition)(view)
    again = any(view.repeats(one) for one in view.earlier)
    if view.good and not again and acquisition.left() < LEAST_LEFT:
        return
    enough, first = ENOUGH_AGAIN if again else 0.0, 2 - len(view.history) % 2
    for switches in (first, 3 - first):
        found = acquisition.best(switches)
        if view.good:
            worth = [(one, promised) for one, promised in found if promised >= enough]
            found = sorted(worth, key=lambda pair: pair[1] / view.budget.cost(pair[0]), reverse=True)
        for configuration, _ in found:
            if configuration.key not in view.taken:
                yield configuration


PROPOSER = ExpectedImprovement()

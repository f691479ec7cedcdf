"""Takes the best configuration's levers back one at a time, so that the answer can say what each of them brought."""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.states import Origin
from service.levers import as_fixed, taken_back
from worker.plan.proposers import Proposal, first_affordable
from worker.plan.view import View

KEPT_SHARE = 4  # one in so many of a job's trials is kept for taking levers back, at most


class Ablation:
    """Proposes the best configuration with one lever as the baseline has it. One that is faster becomes the best."""

    order, always = 25, False

    def propose(self, view: View) -> Proposal | None:
        """The first of these that was not tried, and that there is time for."""
        return first_affordable(view, pending(view), Origin.ablation)


def pending(view: View) -> list[Configuration]:
    """The best configuration with one lever taken back, for each lever: those that are untried and may be recommended.

    In a quick search only where the job fixes levers, and the best has a single one beside these: without fixed ones
    the baseline itself tells what a single lever brings; with them, it may not be recommended.
    """
    reference, best = view.baseline_request(), view.best()
    if best is None or reference is None:
        return []
    every = taken_back(view.spec, best.configuration, reference.configuration).values()
    found = [one for one in every if as_fixed(view.spec, one)]
    if view.spec.search.verify == "quick" and (len(found) > 1 or as_fixed(view.spec, reference.configuration)):
        return []
    return [one for one in found if one.key not in view.taken]


def kept_for_ablation(view: View) -> int:
    """How many of the job's last trials are for taking levers back: one a lever, but at most a quarter of all."""
    return min(sum(map(view.budget.affords, pending(view))), view.spec.search.trials // KEPT_SHARE)


PROPOSER = Ablation()

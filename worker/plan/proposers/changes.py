"""Changes single levers of the best configuration so far, in the order in which the catalogue ranks the changes."""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.job import JobSpec
from service.contract.measurement import Measurement
from service.contract.states import Origin
from service.levers import LEVERS
from worker.plan.proposers import Proposal
from worker.plan.space import Space, inside, make
from worker.plan.view import View


class Changes:
    """Proposes the ranked changes for which there is time."""

    order, always = 20, False

    def propose(self, view: View) -> Proposal | None:
        """The first change that has not been tried, of the best configuration that is in the search space."""
        best = next((one for one in view.good if inside(one.configuration, view.choices, view.spec.task)), None)
        for configuration in changes(view.spec, best, view.choices) if best else ():
            if configuration.key not in view.taken and view.budget.affords(configuration):
                return Proposal(configuration, Origin.recipe)
        return None


def changes(spec: JobSpec, found: Measurement, choices: Space) -> list[Configuration]:
    """The best configuration with one lever changed; levers that save memory only where that limits the micro batch."""
    best = found.configuration
    ranked = [
        (choice.change_rank, lever.name, choice.name)
        for lever in LEVERS.values()
        for choice in lever.choices
        if choice.change_rank is not None and not (lever.saves_memory and has_room(found))
    ]
    made = [
        make(spec, best.method, {**best.levers, lever: choice}, best.effective_batch_size)
        for _, lever, choice in sorted(ranked)
        if choice in choices[lever] and best.levers[lever] != choice
    ]
    return [one for one in made if one]


def has_room(found: Measurement) -> bool:
    """Whether twice the fastest micro batch would fit, so that more memory would not make it faster."""
    return 2 * (found.micro_batch_size or 1) <= (found.predicted_micro_batch or 0)


PROPOSER = Changes()

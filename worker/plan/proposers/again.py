"""A recommendation's configuration, measured again beside the baseline of its job (`dynotune verify`)."""

from __future__ import annotations

from service.contract.states import Origin
from service.levers import LEVERS
from worker.plan.proposers import Proposal
from worker.plan.space import make
from worker.plan.view import View


class Again:
    """Proposes what the job fixes at the sizes and the rate of `search.again`, once the baseline has run or failed.

    Whatever the budget is: a baseline that does not fit at its own micro batch takes two trials.
    """

    order, always = 5, True

    def propose(self, view: View) -> Proposal | None:
        """The configuration, or None where the job asks for none, or where it was tried."""
        again = view.spec.search.again
        if again is None or view.baseline_is_open():
            return None
        levers = {name: view.spec.search.fixed.get(name, lever.baseline) for name, lever in LEVERS.items()}
        made = make(view.spec, view.method, levers, again.effective_batch_size)
        if made is None:
            return None
        sizes = {"micro_batch_size": again.micro_batch_size, "learning_rate": again.learning_rate}
        wanted = made.model_copy(update=sizes)
        return None if wanted.key in view.taken else Proposal(wanted, Origin.search)


PROPOSER = Again()

"""Repeats trials that are close to the best and were disturbed by other processes, when nothing else is left to try."""

from __future__ import annotations

from service.contract.states import Origin
from worker.plan.proposers import Proposal
from worker.plan.view import View


class Repeat:
    """Proposes each disturbed configuration once."""

    order, always = 40, False

    def propose(self, view: View) -> Proposal | None:
        """The best of the disturbed configurations that have not been repeated yet."""
        for one in view.near():
            if one.timing and one.timing.is_disturbed and one.configuration.key not in view.repeated:
                return Proposal(one.configuration, Origin.repeat)
        return None


PROPOSER = Repeat()

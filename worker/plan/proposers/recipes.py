"""Known-good recipes for a device: what a person would try first."""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.states import Origin
from service.levers import LEVERS
from worker.plan.proposers import Proposal
from worker.plan.space import make
from worker.plan.view import View


class Recipes:
    """Proposes the recipes one after the other. Where the effective batch is open, they take the second smallest."""

    order, always = 10, False

    def propose(self, view: View) -> Proposal | None:
        """The first recipe that was not tried."""
        effective = view.effectives[min(1, len(view.effectives) - 1)]
        for configuration in recipes(view, effective):
            if configuration.key not in view.taken:
                return Proposal(configuration, Origin.recipe)
        return None


def recipes(view: View, effective: int) -> list[Configuration]:
    """The recipes for this hardware: one for each ranked choice of the levers that ask for one recipe a choice."""
    choices = view.choices

    def first(lever: str, preferred: tuple[str, ...]) -> str:
        return next((choice for choice in preferred if choice in choices[lever]), choices[lever][0])

    # What is only emulated here is not ranked: it is tried later, if it was asked for.
    common = {
        name: first(name, lever.ranked(view.facts) if lever.recipe == "first" else (lever.baseline,))
        for name, lever in LEVERS.items()
    }
    varied = [name for name, lever in LEVERS.items() if lever.recipe == "each"]
    found = [
        make(view.spec, view.method, {**common, name: choice}, effective)
        for name in varied
        for choice in LEVERS[name].ranked(view.facts)
        if choice in choices[name]
    ]
    if not any(found):
        levers = common | {name: choices[name][0] for name in varied}
        found = [make(view.spec, view.method, levers, effective)]
    return [one for one in found if one]


PROPOSER = Recipes()

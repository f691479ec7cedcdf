"""Recipes: configurations that are known to be good on a kind of device, which an expert would try first."""

from __future__ import annotations

from service.contract.configuration import Configuration
from service.contract.states import Origin
from service.levers import LEVERS
from worker.plan.proposers import Proposal
from worker.plan.space import make
from worker.plan.view import View


class Recipes:
    """Proposes the recipes one after another; where the job gives no effective batch, with the second smallest."""

    order, always = 10, False

    def propose(self, view: View) -> Proposal | None:
        """The first recipe that has not been tried."""
        effective = view.effectives[min(1, len(view.effectives) - 1)]
        for configuration in recipes(view, effective):
            if configuration.key not in view.taken:
                return Proposal(configuration, Origin.recipe)
        return None


def recipes(view: View, effective: int) -> list[Configuration]:
    """The recipes for this hardware: one for each ranked choice of the levers whose `recipe` is "each"."""
    choices = view.choices

    def first(lever: str, preferred: tuple[str, ...]) -> str:
        return next((choice for choice in preferred if choice in choices[lever]), choices[lever][0])

    # Choices that this hardware only emulates are not ranked, so no recipe has them (docs/decisions/0006).
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

"""Proposers are found in their folder, in a fixed order, and leave what they look at as it was."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.task import PlanInput
from tests.factory import history
from worker.plan.proposers import proposers
from worker.plan.view import View

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


def test_proposers_are_asked_in_their_order_the_baseline_first() -> None:
    names = [type(proposer).__name__ for proposer in proposers()]
    assert names == ["Baseline", "Model", "Ablation", "Search", "Repeat"]
    assert [proposer.always for proposer in proposers()] == [True, False, False, False, False]
    assert len({proposer.order for proposer in proposers()}) == len(names)


def test_a_proposer_is_pure(spec: Spec, facts: Facts) -> None:
    known = PlanInput(spec=spec(search={"trials": 50}), facts=facts(), history=history(spec(), 6.0, 5.0), next_number=4)
    view = View(known, "lora")
    for proposer in proposers():
        before = deepcopy({name: value for name, value in vars(view).items() if name != "budget"})
        first = proposer.propose(view)
        assert proposer.propose(view) == first == proposer.propose(View(known, "lora"))
        assert before == {name: value for name, value in vars(view).items() if name != "budget"}

"""Every proposer is held to what a trial needs: it was not tried, it is no excluded combination, and it is whole."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.contract.states import Origin
from service.contract.task import PlanInput, TrialRecord, TrialRequest
from service.levers import excluded
from tests.factory import configuration, failed, history, measured, record
from worker.plan import plan
from worker.plan.proposers import BadProposal, Proposal, asked, name_of, proposers
from worker.plan.space import point
from worker.plan.view import View

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]
JOBS: list[dict[str, Any]] = [
    {},
    {"method": "full", "search": {"quality": "allow"}},
    {"method": ["lora", "qlora"]},
    {"task": "sequence-classification"},
    {"task": "masked-lm", "method": "full"},
    {"search": {"fixed": {"batching": "packed"}}},
    {"search": {"levers": ["optimizer", "compile", "batching"]}},
    {"search": {"objective": "memory"}},
    {"baseline": {"optim": "sgd", "group_by_length": True}},
]


def some_ending(made: Configuration, drawn: random.Random) -> Measurement:
    """A measurement of any kind: good, disturbed, out of memory, or crashed."""
    if drawn.random() < 0.25:
        return failed(made, drawn.choice([Outcome.infeasible, Outcome.crashed]))
    good = measured(made, drawn.uniform(4.0, 12.0), predicted_micro_batch=drawn.choice([None, 16]))
    if good.timing is not None and drawn.random() < 0.3:
        return good.model_copy(update={"timing": good.timing.model_copy(update={"clean_share": 0.5})})
    return good


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_all_proposers_propose_what_can_be_tried_whatever_was_measured(
    job: dict[str, Any], seed: int, spec: Spec, facts: Facts
) -> None:
    """Each is asked of every state of a search, also where another is asked before it and has a proposal."""
    drawn, records = random.Random(seed), list[TrialRecord]()
    search = {"trials": 12, "minutes": 600, "seed": seed} | job.get("search", {})
    wanted = spec(**{**job, "search": search})
    while True:
        known = PlanInput(spec=wanted, facts=facts(), history=tuple(records), next_number=len(records) + 1, workers=2)
        for method in wanted.method:
            for proposer in proposers():
                asked(proposer, View(known, method))
        trials = plan(known).trials
        if not trials:
            break
        for one in trials:
            records.append(TrialRecord(request=one, measurement=some_ending(one.configuration, drawn)))
    once = [one.configuration.key for one in (each.request for each in records) if one.origin is not Origin.repeat]
    assert len(once) == len(set(once)) > 1
    for request in (one.request for one in records if one.request.origin is not Origin.baseline):
        assert excluded(point(request.configuration, wanted)) is None


class Stubborn:
    """Proposes the same whatever the view."""

    order, always = 18, False

    def __init__(self, made: Configuration, origin: Origin = Origin.search) -> None:
        self.made, self.origin = made, origin

    def propose(self, view: View) -> Proposal | None:
        return Proposal(self.made, self.origin)


class Broken(Stubborn):
    """Fails on every view."""

    def propose(self, view: View) -> Proposal | None:
        raise ZeroDivisionError("float division by zero")


def planned_with(proposer: Stubborn, known: PlanInput, monkeypatch: pytest.MonkeyPatch) -> tuple[TrialRequest, ...]:
    """What is planned where it is asked before all others but the baseline."""
    (first, *others) = proposers()
    monkeypatch.setattr(sys.modules["worker.plan"], "proposers", lambda: [first, proposer, *others])
    return plan(known).trials


@pytest.mark.parametrize(
    ("proposer", "sentence"),
    [
        (
            Stubborn(configuration(optimizer="adamw-loop")),
            "proposed a trial that was tried before, or is under way: opti",
        ),
        (Stubborn(configuration(optimizer="adamw-loop"), Origin.repeat), "proposed a trial that was tried before"),
        (Stubborn(configuration(optimizer="adamw-in-backward")), "proposed a trial that is excluded ("),
        (Stubborn(configuration("full")), "proposed a trial that is of the method full, where lora was asked for"),
        (
            Stubborn(configuration(optimizer="adam")),
            "proposed a trial that cannot be, as lever 'optimizer' has no choice",
        ),
        (Stubborn(configuration(gradients="none")), "proposed a trial that does not have a choice of every lever"),
        (
            Stubborn(configuration(padding="max", attention="eager")),
            "proposed a trial that does not have what the",
        ),
        (Broken(configuration()), "failed: ZeroDivisionError: float division by zero"),
    ],
)
def test_what_no_trial_may_be_of_is_refused_with_its_proposers_name(
    proposer: Stubborn, sentence: str, spec: Spec, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = record(measured(configuration(optimizer="adamw-loop")), Origin.repeat, number=3)
    job = spec(search={"fixed": {"padding": "longest"}})
    known = PlanInput(spec=job, facts=facts(), history=(*history(job, 6.0), tried), next_number=4)
    with pytest.raises(BadProposal) as told:
        planned_with(proposer, known, monkeypatch)
    assert str(told.value).startswith(f"the proposer {name_of(proposer)} {sentence}")


def test_a_repeat_that_was_not_made_yet_is_meant(spec: Spec, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    records = history(spec(), 6.0)
    known = PlanInput(spec=spec(), facts=facts(), history=records, next_number=3)
    tried = records[-1].request.configuration
    (request,) = planned_with(Stubborn(tried, Origin.repeat), known, monkeypatch)
    assert request.configuration == tried and request.origin is Origin.repeat

"""A plan is told the trials of earlier jobs on the same hardware, unless the job says search.reuse: false."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.states import JobPhase, Origin
from service.contract.task import PlanClaim, PlanDecision, PlanInput, TaskKind, TrialClaim, TrialRequest
from service.queue import Queue
from tests.factory import configuration, measured

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


def planned(queue: Queue, worker: str = "w") -> tuple[PlanClaim, PlanInput]:
    claim = queue.claim(worker, (TaskKind.plan,))
    assert isinstance(claim, PlanClaim)
    return claim, queue.plan_input(claim)


def finish(queue: Queue, spec: JobSpec) -> None:
    """A job with a baseline of 10 seconds and a trial of 5, which ends."""
    queue.submit(spec)
    claim, _ = planned(queue)
    asked = ((configuration(micro=8), Origin.baseline, 10.0), (configuration(batching="grouped"), Origin.search, 5.0))
    requests = tuple(
        TrialRequest(configuration=made, origin=origin, number=at + 1) for at, (made, origin, _) in enumerate(asked)
    )
    queue.finish_plan(claim, PlanDecision(trials=requests, phase=JobPhase.searching))
    for made, _, seconds in asked:
        trial = queue.claim("w", (TaskKind.trial,))
        assert isinstance(trial, TrialClaim)
        queue.finish_trial(trial, measured(made, seconds, parameters=7), "")
    claim, _ = planned(queue)
    queue.finish_plan(claim, PlanDecision(finish=True, phase=JobPhase.done))


@pytest.fixture
def worker(queue: Queue, facts: Facts) -> str:
    queue.register("w", 1, facts())
    return "w"


def test_the_same_job_and_others_of_its_task_are_known(queue: Queue, facts: Facts, spec: Spec, worker: str) -> None:
    finish(queue, spec())
    finish(queue, spec(training={"effective_batch_size": 32, "learning_rate": 1e-3}))
    queue.submit(spec(name="again", search={"minutes": 5, "verify": "strict"}, hardware={"price_per_hour": 2}))
    _, known = planned(queue)
    assert [one.same_job for one in known.earlier] == [True, False], "name, price and the search's depth do not matter"
    first = known.earlier[0]
    assert first.configuration.levers["batching"] == "grouped" and first.ratio == 0.5 and first.parameters == 7
    assert first.dataset == "f" * 16


def test_other_hardware_other_tasks_and_a_refusal_know_nothing(
    queue: Queue, facts: Facts, spec: Spec, worker: str
) -> None:
    finish(queue, spec())
    mine = spec(baseline={"attn_implementation": "eager"})  # to which paces of the usual baseline do not compare
    for refused in (spec(search={"reuse": False}), spec(task="sequence-classification"), mine):
        queue.submit(refused)
        claim, known = planned(queue)
        assert known.earlier == ()
        queue.finish_plan(claim, PlanDecision(finish=True, error="over", phase=JobPhase.done))
    queue.register("other", 2, facts(name="Other CPU"))
    queue.submit(spec())
    assert planned(queue, "other")[1].earlier == ()


def test_whether_to_reuse_is_true_or_false() -> None:
    job = {"model": {"source": "a/b"}, "dataset": {"source": "c/d"}}
    assert JobSpec.model_validate(job).search.reuse
    assert not JobSpec.model_validate(job | {"search": {"reuse": False}}).search.reuse
    with pytest.raises(ValueError, match="cannot be true"):
        JobSpec.model_validate(job | {"search": {"trials": True}})

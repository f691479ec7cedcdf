"""A defect that keeps a recommendation from being computed ends its job with a reason, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from service import conclude
from service.contract.job import JobSpec
from service.contract.task import PlanClaim, PlanDecision, TrialClaim
from service.models import Task
from service.queue import Queue
from tests.factory import configuration, measured
from tests.service.test_queue import PLAN, TRIAL, die, plan_trials, queue, request, started, status

__all__ = ["queue", "started"]  # fixtures
SAID = "The recommendation could not be computed: ZeroDivisionError: division by zero"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Breaks what computes recommendations, once it is called."""

    def recommend(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    return lambda: monkeypatch.setattr(conclude, "recommend", recommend)


def failed_with_the_reason(engine: Engine, job_id: str) -> bool:
    job = status(engine, job_id)
    return job.status == "failed" and SAID in (job.error or "")


def test_a_trial_keeps_what_it_measured(queue: Queue, engine: Engine, started: str, broken: Any) -> None:
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    broken()
    queue.finish_trial(claim, measured(configuration()), "printed")
    assert failed_with_the_reason(engine, started)
    with engine.connect() as connection:
        kept = connection.execute(Task.__table__.select().where(Task.id == claim.task_id)).mappings().one()
    assert (kept["state"], kept["log"], kept["outcome"]) == ("cancelled", "printed", "ok")
    assert kept["result"]["micro_batch_size"] == measured(configuration()).micro_batch_size


def test_a_plan_ends_its_job(queue: Queue, engine: Engine, started: str, broken: Any) -> None:
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    queue.finish_trial(claim, measured(configuration()), "")
    planning = queue.claim("w", PLAN)
    assert isinstance(planning, PlanClaim)
    queue.plan_input(planning)
    broken()
    queue.finish_plan(planning, PlanDecision(finish=True))
    assert failed_with_the_reason(engine, started)
    assert status(engine, started).recommendation is not None, "the one before stays"


def test_who_looks_for_dead_workers_goes_on(queue: Queue, engine: Engine, started: str, broken: Any) -> None:
    broken()
    die(queue, engine, TRIAL)
    assert failed_with_the_reason(engine, started)


@pytest.mark.parametrize(("how", "ended_as"), [("cancel", "cancelled"), ("stop", "failed")])
def test_users_and_workers_can_still_end_the_job(
    queue: Queue, engine: Engine, started: str, broken: Any, how: str, ended_as: str
) -> None:
    other = queue.submit(JobSpec.model_validate(status(engine, started).spec))
    plan_trials(queue, "w", request())
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    broken()
    queue.fail(claim, "the disk is full")
    ended, left = (started, other) if claim.job_id == started else (other, started)
    assert status(engine, ended).error == "the disk is full"
    (queue.cancel if how == "cancel" else queue.stop)(left)
    assert status(engine, left).status == ended_as

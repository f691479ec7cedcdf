"""What a plan decides is carried out, and what ends while it is made, or after its job has ended, is not lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from service import jobs
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Verification
from service.contract.states import JobPhase, JobStatus, Origin, TaskState
from service.contract.task import (
    PlanClaim,
    PlanDecision,
    TaskKind,
    TrialClaim,
    TrialRequest,
    VerifyClaim,
    VerifyRequest,
    Wish,
)
from service.models import Job, Task
from service.queue import Queue
from tests.factory import configuration, measured

PLAN, TRIAL, VERIFY = (TaskKind.plan,), (TaskKind.trial,), (TaskKind.verify,)
GOOD = measured(configuration(), 10.0)
CHECK = VerifyRequest(method="lora", baseline=GOOD, finalists=(GOOD,), blocks=1, seconds_limit=60)


def request(number: int, **levers: Any) -> TrialRequest:
    return TrialRequest(configuration=configuration(**levers), origin=Origin.recipe, number=number)


@pytest.fixture
def job_id(queue: Queue, facts: Callable[..., HardwareFacts], spec: Callable[..., JobSpec]) -> str:
    """A job that is not planned yet, and the worker 'w'."""
    queue.register("w", 1, facts())
    return queue.submit(spec())


def planning(queue: Queue) -> PlanClaim:
    """The claim of the open plan, which has read what it may know."""
    claim = queue.claim("w", PLAN)
    assert isinstance(claim, PlanClaim)
    queue.plan_input(claim)
    return claim


def decide(queue: Queue, **decision: Any) -> None:
    """Claim the open plan, and have it decide so."""
    queue.finish_plan(planning(queue), PlanDecision(**decision))


def trial(queue: Queue) -> TrialClaim:
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    return claim


def end(queue: Queue, claim: TrialClaim, **changes: Any) -> Measurement:
    """End a trial with a good measurement."""
    made = measured(claim.request.configuration, **changes)
    queue.finish_trial(claim, made, "")
    return made


def second_of_two(queue: Queue) -> TrialClaim:
    """The second of two trials, which is under way; the first has ended."""
    decide(queue, trials=(request(1), request(2, batching="sorted")))
    first, second = trial(queue), trial(queue)
    end(queue, first)
    return second


def stored(engine: Engine, job_id: str) -> Job:
    with Session(engine) as session:
        return jobs.get(session, job_id)


def tasks(engine: Engine, kind: TaskKind, state: TaskState) -> int:
    """How many tasks of a kind are in a state."""
    with Session(engine) as session:
        return len(session.scalars(select(Task.id).where(Task.kind == kind, Task.state == state)).all())


def test_a_verification_is_not_begun_by_a_plan_that_did_not_know_the_last_trial(
    queue: Queue, engine: Engine, job_id: str
) -> None:
    """That trial may be faster than all finalists; another plan decides with it."""
    second = second_of_two(queue)
    claim = planning(queue)
    end(queue, second)
    queue.finish_plan(claim, PlanDecision(verify=CHECK, phase=JobPhase.verifying, notes=("a note",)))
    assert tasks(engine, TaskKind.verify, TaskState.queued) == 0
    job = stored(engine, job_id)
    assert job.phase is JobPhase.verifying and job.notes == ["a note"]
    decide(queue, verify=CHECK)
    assert tasks(engine, TaskKind.verify, TaskState.queued) == 1


def test_what_a_plan_does_not_say_stays_as_it_was_told_before(queue: Queue, engine: Engine, job_id: str) -> None:
    decide(queue, trials=(request(1), request(2, batching="sorted")), planned_trials=12, notes=("first",))
    end(queue, trial(queue))
    decide(queue, phase=JobPhase.verifying, notes=("second", "first"))
    job = stored(engine, job_id)
    assert (job.planned_trials, job.notes, job.phase) == (12, ["first", "second"], JobPhase.verifying)
    assert job.recommendation and {"first", "second"} <= {*job.recommendation["notes"]}, "so far, too"
    end(queue, trial(queue), seconds=12.0)
    decide(queue, trials=(request(3, batching="packed"),), planned_trials=14)
    assert stored(engine, job_id).planned_trials == 14


def test_a_plan_that_waits_for_a_trial_under_way_does_not_end_the_job(
    queue: Queue, engine: Engine, job_id: str
) -> None:
    """As the last of its trials begins, a plan of an earlier one's end may find nothing further to do."""
    second = second_of_two(queue)
    decide(queue)
    assert stored(engine, job_id).status is JobStatus.running
    end(queue, second)
    decide(queue, finish=True)
    assert stored(engine, job_id).status is JobStatus.succeeded


def test_the_end_of_a_search_has_its_answer_and_its_notes(queue: Queue, engine: Engine, job_id: str) -> None:
    decide(queue, trials=(request(1),))
    end(queue, trial(queue))
    decide(queue, finish=True, notes=("the time was short",), planned_trials=1)
    job = stored(engine, job_id)
    assert job.status is JobStatus.succeeded and job.phase is JobPhase.done and job.finished_at is not None
    assert job.recommendation and job.recommendation["final"] is True
    assert "the time was short" in job.recommendation["notes"] and job.notes == ["the time was short"]


def test_a_plan_s_own_sentence_says_why_a_job_failed(queue: Queue, engine: Engine, job_id: str) -> None:
    """It knows more than that nothing is stable."""
    decide(queue, finish=True, error="Every configuration ran out of memory.")
    job = stored(engine, job_id)
    assert job.status is JobStatus.failed and job.error == "Every configuration ran out of memory."


@pytest.mark.parametrize("decision", [{"trials": (request(2, batching="sorted"),)}, {"finish": True, "error": "no"}])
def test_a_plan_changes_nothing_of_a_job_that_was_cancelled_meanwhile(
    queue: Queue, engine: Engine, job_id: str, decision: dict[str, Any]
) -> None:
    decide(queue, trials=(request(1),))
    end(queue, trial(queue))
    claim = planning(queue)
    queue.cancel(job_id)
    queue.finish_plan(claim, PlanDecision(**decision))
    job = stored(engine, job_id)
    assert job.status is JobStatus.cancelled and job.error is None
    assert tasks(engine, TaskKind.trial, TaskState.queued) == 0


def test_a_trial_that_ends_after_its_job_is_kept_and_changes_no_answer(
    queue: Queue, engine: Engine, job_id: str
) -> None:
    """The user was told the answer as the final one."""
    second = second_of_two(queue)
    queue.stop(job_id)
    end(queue, second, seconds=5.0)
    job = stored(engine, job_id)
    assert job.status is JobStatus.succeeded and job.recommendation and job.recommendation["final"] is True
    assert job.recommendation["evidence"]["measurement"]["timing"]["seconds"] == 10.0
    assert job.history_version == 2 and tasks(engine, TaskKind.plan, TaskState.queued) == 0
    with Session(engine) as session:
        assert [one.outcome for one in jobs.trials(session, jobs.get(session, job_id))] == ["ok", "ok"]


def test_a_plan_sees_trials_in_the_order_in_which_they_ended(queue: Queue, job_id: str) -> None:
    """Of several workers one may be slow; what is said last of a choice is what holds."""
    decide(queue, trials=(request(1), request(2, batching="sorted")))
    first, second = trial(queue), trial(queue)
    ended = [end(queue, second), end(queue, first)]
    claim = queue.claim("w", PLAN)
    assert isinstance(claim, PlanClaim)
    assert [one.measurement for one in queue.plan_input(claim).history] == ended


def test_the_answer_after_a_verification_is_not_final_and_its_log_is_kept(
    queue: Queue, engine: Engine, job_id: str
) -> None:
    """Other methods may still be verified."""
    decide(queue, trials=(request(1),))
    end(queue, trial(queue))
    decide(queue, verify=CHECK, phase=JobPhase.verifying)
    claim = queue.claim("w", VERIFY)
    assert isinstance(claim, VerifyClaim)
    found = Verification(baseline_key=GOOD.configuration.key, blocks=(), verdicts=(), ranking=(), seconds=5.0)
    queue.finish_verify(claim, found, "it was soaked")
    job = stored(engine, job_id)
    assert job.recommendation and job.recommendation["final"] is False
    assert job.recommendation["time_spent"]["verification"] == 5.0
    with Session(engine) as session:
        assert session.scalars(select(Task.log).where(Task.kind == TaskKind.verify)).one() == "it was soaked"


def test_a_task_that_fails_its_job_keeps_what_it_printed_and_when_it_ended(
    queue: Queue, engine: Engine, job_id: str
) -> None:
    decide(queue, trials=(request(1),))
    queue.fail(trial(queue), "there is no column 'text'", "Traceback")
    job = stored(engine, job_id)
    assert job.status is JobStatus.failed and job.error == "there is no column 'text'"
    with Session(engine) as session:
        row = session.scalars(select(Task).where(Task.kind == TaskKind.trial)).one()
        assert (row.state, row.log) == (TaskState.cancelled, "Traceback") and row.finished_at is not None


def test_a_job_that_fails_has_its_last_answer_as_the_final_one_and_ends_its_other_trials(
    queue: Queue, engine: Engine, job_id: str
) -> None:
    decide(queue, trials=(request(1), request(2, batching="sorted"), request(3, batching="packed")))
    first, second, third = trial(queue), trial(queue), trial(queue)
    end(queue, first)
    queue.fail(second, "the disk is full")
    job = stored(engine, job_id)
    assert job.recommendation and job.recommendation["final"] is True
    assert queue.renew(third) is Wish.cancel
    queue.fail(third, "it was told to end")
    assert stored(engine, job_id).error == "the disk is full"


def test_a_failure_after_the_end_does_not_fail_a_job(queue: Queue, engine: Engine, job_id: str) -> None:
    second = second_of_two(queue)
    queue.stop(job_id)
    queue.fail(second, "the disk is full")
    job = stored(engine, job_id)
    assert job.status is JobStatus.succeeded and job.error is None
    assert tasks(engine, TaskKind.trial, TaskState.running) == 0


def test_what_a_task_does_is_told_in_a_whole_sentence(queue: Queue, engine: Engine, job_id: str) -> None:
    decide(queue, trials=(request(1),))
    claim, sentence = trial(queue), "timing micro batch 16 again, beside the best so far, as both may have been slowed"
    queue.renew(claim, sentence)
    with Session(engine) as session:
        assert session.scalars(select(Task.progress).where(Task.id == claim.task_id)).one() == sentence


@pytest.mark.parametrize("dies", [False, True], ids=["released", "died"])
def test_a_task_that_waits_again_has_not_begun(queue: Queue, engine: Engine, job_id: str, dies: bool) -> None:
    """Or the time that it waits for another worker would count as time used."""
    decide(queue, trials=(request(1),))
    claim = trial(queue)
    if dies:
        with Session(engine) as session, session.begin():
            session.execute(update(Task).where(Task.id == claim.task_id).values(lease_until=1.0))
        assert queue.reap() == 1
    else:
        queue.release(claim)
    with Session(engine) as session:
        row = session.scalars(select(Task).where(Task.id == claim.task_id)).one()
        assert (row.state, row.started_at, row.worker_id) == (TaskState.queued, None, None)


@pytest.mark.parametrize("dies", [False, True], ids=["released", "died"])
def test_a_task_of_a_job_that_has_ended_is_not_given_to_another_worker(
    queue: Queue, engine: Engine, job_id: str, dies: bool
) -> None:
    decide(queue, trials=(request(1),))
    claim = trial(queue)
    queue.cancel(job_id)
    if dies:
        with Session(engine) as session, session.begin():
            session.execute(update(Task).where(Task.id == claim.task_id).values(lease_until=1.0))
        assert queue.reap() == 1
    else:
        queue.release(claim)
    assert queue.claim("w", TRIAL) is None and tasks(engine, TaskKind.trial, TaskState.cancelled) == 1

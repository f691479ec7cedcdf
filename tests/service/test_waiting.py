"""Why a job waits: the sentence is about all workers, and there also once the job has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from service import events, jobs
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Outcome
from service.contract.states import JobPhase, JobStatus, Origin
from service.contract.task import MOST_LEASE_SECONDS, PlanClaim, PlanDecision, TaskKind, TrialClaim, TrialRequest
from service.db import now
from service.models import Job, Task, Worker
from service.queue import Queue
from tests.factory import configuration, measured

Spec = Callable[..., JobSpec]
Facts = Callable[..., HardwareFacts]


def waits(engine: Engine, job_id: str) -> Any:
    with Session(engine) as session:
        return jobs.view(session, jobs.get(session, job_id), now(session)).waiting_for


def begin(queue: Queue, worker: str) -> str:
    """Claim and carry out the plan of the oldest job: one trial is queued."""
    claim = queue.claim(worker, (TaskKind.plan,))
    assert isinstance(claim, PlanClaim)
    queue.plan_input(claim)
    request = TrialRequest(configuration=configuration(), origin=Origin.baseline, number=1)
    queue.finish_plan(claim, PlanDecision(trials=(request,)))
    return claim.job_id


def test_one_idle_worker_is_enough(engine: Engine, queue: Queue, spec: Spec, facts: Facts) -> None:
    busy_with = queue.submit(spec())
    queue.register("a", 1, facts())
    assert waits(engine, busy_with) is None
    assert queue.claim("a", (TaskKind.plan,)) is not None
    waiting = queue.submit(spec())
    assert waits(engine, waiting) == "All fitting workers are busy with other jobs."
    queue.register("b", 2, facts())
    assert waits(engine, waiting) is None


def test_when_a_waiting_job_ends_is_not_told(engine: Engine, queue: Queue, spec: Spec, facts: Facts) -> None:
    """Nobody knows when it goes on, though it has begun."""
    queue.register("a", 1, facts())
    begun, ahead = queue.submit(spec()), queue.submit(spec(priority=1))
    begin(queue, "a")
    begin(queue, "a")

    def end(job_id: str) -> Any:
        with Session(engine) as session:
            return jobs.view(session, jobs.get(session, job_id), now(session)).estimated_finish_at

    assert end(begun) is not None
    claim = queue.claim("a", (TaskKind.trial,))
    assert isinstance(claim, TrialClaim) and claim.job_id == ahead
    assert end(begun) is None and end(ahead) is not None


def test_a_worker_that_does_not_fit_and_one_that_is_busy(
    engine: Engine, queue: Queue, spec: Spec, facts: Facts
) -> None:
    queue.submit(spec())
    queue.register("big", 1, facts(name="Big CPU"))
    queue.claim("big", (TaskKind.plan,))
    queue.register("a", 2, facts())
    waiting = queue.submit(spec(hardware={"name": "big"}))
    assert waits(engine, waiting) == "All fitting workers are busy with other jobs."


def test_a_begun_job_whose_worker_came_back_changed(engine: Engine, queue: Queue, spec: Spec, facts: Facts) -> None:
    job_id = queue.submit(spec())
    queue.register("old", 1, facts())
    begin(queue, "old")
    assert waits(engine, job_id) is None
    queue.leave("old")
    assert "No worker is connected" in waits(engine, job_id)
    queue.register("new", 2, facts(versions={"python": "3.11", "torch": "2.14.0"}))
    assert queue.claim("new", (TaskKind.trial,)) is None
    said = waits(engine, job_id)
    assert "new is not what the job was begun on (torch 2.14.0 instead of 2.13.0)" in said and "submit it again" in said
    queue.register("same", 3, facts())
    assert waits(engine, job_id) is None
    assert queue.claim("same", (TaskKind.trial,)) is not None
    queue.leave("same")
    assert waits(engine, job_id) is None  # until the reaper says so, its task is under way
    queue.cancel(job_id)
    assert waits(engine, job_id) is None


@pytest.mark.parametrize("planned", [False, True], ids=["released", "planned"])
def test_a_job_of_which_nothing_is_measured_goes_on_elsewhere(
    engine: Engine, queue: Queue, spec: Spec, facts: Facts, planned: bool
) -> None:
    """The worker that made its plan has left, and nobody of its kind comes back."""
    job_id = queue.submit(spec())
    queue.register("old", 1, facts())
    if planned:
        begin(queue, "old")
    else:
        claim = queue.claim("old", (TaskKind.plan,))
        assert claim is not None
        queue.release(claim)
    queue.register("new", 2, facts(name="Another CPU"))
    queue.reap()
    assert queue.claim("new", tuple(TaskKind)) is None, "as long as the old one lives"
    queue.leave("old")
    queue.reap()
    assert begin(queue, "new") == job_id
    trial = queue.claim("new", (TaskKind.trial,))
    assert isinstance(trial, TrialClaim) and queue.claim("new", tuple(TaskKind)) is None
    with Session(engine) as session:
        job = jobs.get(session, job_id)
        assert job.facts and job.facts["name"] == "Another CPU"
        kinds = [event.kind for event in events.tail(session, job_id)]
    assert kinds == ["submitted", "started", "unbound", "started"]


def test_a_job_that_goes_on_elsewhere_is_told_once_and_began_when_it_did(
    engine: Engine, queue: Queue, spec: Spec, facts: Facts
) -> None:
    job_id = queue.submit(spec())
    queue.register("old", 1, facts())
    begin(queue, "old")
    with Session(engine) as session, session.begin():
        session.execute(update(Job).where(Job.id == job_id).values(started_at=1000.0))
    queue.leave("old")
    for _ in range(2):
        queue.reap()
    with Session(engine) as session:
        assert [event.kind for event in events.tail(session, job_id)] == ["submitted", "started", "unbound"]
    queue.register("new", 2, facts(name="Another CPU"))
    assert queue.claim("new", (TaskKind.plan,)) is not None
    with Session(engine) as session:
        job = jobs.get(session, job_id)
        assert job.started_at == 1000.0 and job.phase is JobPhase.baseline


def test_a_job_waits_no_longer_for_a_worker_that_is_not_heard_of(
    engine: Engine, queue: Queue, spec: Spec, facts: Facts
) -> None:
    """It may still be listed. What was planned for its hardware says nothing of another's, nor do the plan's notes."""
    job_id = queue.submit(spec())
    queue.register("old", 1, facts())
    claim = queue.claim("old", (TaskKind.plan,))
    assert isinstance(claim, PlanClaim)
    queue.plan_input(claim)
    request = TrialRequest(configuration=configuration(), origin=Origin.baseline, number=1)
    queue.finish_plan(claim, PlanDecision(trials=(request,), planned_trials=9, notes=("no compiler was found",)))
    with Session(engine) as session, session.begin():
        session.execute(update(Worker).values(seen_at=now(session) - 3600))
    queue.reap()
    queue.register("new", 2, facts(name="Another CPU"))
    assert queue.claim("new", (TaskKind.plan,)) is not None
    with Session(engine) as session:
        job = jobs.get(session, job_id)
        assert (job.planned_trials, job.notes or []) == (None, [])


def test_a_job_stays_while_its_trial_runs(engine: Engine, queue: Queue, spec: Spec, facts: Facts) -> None:
    """Its worker may have been started again beside the process that holds the lease."""
    job_id = queue.submit(spec())
    queue.register("old", 1, facts())
    begin(queue, "old")
    claim = queue.claim("old", (TaskKind.trial,))
    assert isinstance(claim, TrialClaim)
    queue.leave("old")
    queue.register("new", 2, facts(name="Another CPU"))
    queue.reap()
    assert queue.claim("new", tuple(TaskKind)) is None
    queue.finish_trial(claim, measured(configuration(), 100.0), "")
    with Session(engine) as session:
        assert [event.kind for event in events.tail(session, job_id)] == ["submitted", "started", "trial"]


def test_a_job_that_has_ended_goes_on_nowhere(engine: Engine, queue: Queue, spec: Spec, facts: Facts) -> None:
    job_id = queue.submit(spec())
    queue.register("old", 1, facts())
    begin(queue, "old")
    queue.cancel(job_id)
    queue.leave("old")
    queue.register("new", 2, facts(name="Another CPU"))
    queue.reap()
    assert queue.claim("new", tuple(TaskKind)) is None
    with Session(engine) as session:
        job = jobs.get(session, job_id)
        assert job.facts and job.facts["name"] == facts().name and job.status is JobStatus.cancelled


def test_a_job_with_a_measured_trial_stays_on_its_hardware(
    engine: Engine, queue: Queue, spec: Spec, facts: Facts
) -> None:
    job_id = queue.submit(spec())
    queue.register("old", 1, facts())
    begin(queue, "old")
    claim = queue.claim("old", (TaskKind.trial,))
    assert isinstance(claim, TrialClaim)
    queue.finish_trial(claim, measured(configuration(), 100.0), "")
    queue.leave("old")
    queue.register("new", 2, facts(name="Another CPU"))
    queue.reap()
    assert queue.claim("new", tuple(TaskKind)) is None
    assert "is not what the job was begun on" in waits(engine, job_id)


def test_a_trial_that_has_ended_its_worker_takes_its_deaths_along(
    engine: Engine, queue: Queue, spec: Spec, facts: Facts
) -> None:
    """Or it could end the workers of one hardware after the other, and never be given up."""
    queue.submit(spec())
    for number in range(3):
        name = f"w{number}"
        queue.register(name, number, facts(name=f"CPU {number}"))
        begin(queue, name)
        with Session(engine) as session, session.begin():
            session.execute(update(Task).values(not_before=None))
        claim = queue.claim(name, (TaskKind.trial,))
        assert isinstance(claim, TrialClaim)
        with Session(engine) as session, session.begin():
            session.execute(update(Task).where(Task.id == claim.task_id).values(lease_until=1.0))
        assert queue.reap() == 1
        queue.leave(name)
        queue.reap()
    with Session(engine) as session:
        trial = session.scalars(select(Task).where(Task.kind == TaskKind.trial)).one()
        assert (trial.deaths, trial.outcome) == (3, Outcome.crashed)


def test_a_worker_counts_as_alive_while_its_own_trial_runs(
    engine: Engine, queue: Queue, spec: Spec, facts: Facts
) -> None:
    """Not while another worker runs what it had been given: its row still names that task."""

    def alive(claim: Any) -> list[str]:
        """Who does, of workers that were not seen for an hour when the claim was renewed."""
        with Session(engine) as session, session.begin():
            session.execute(update(Worker).values(seen_at=now(session) - 3600))
        queue.renew(claim)
        with Session(engine) as session:
            return [one.id for one in jobs.workers(session, now(session)) if one.alive]

    for name in ("w", "v"):
        queue.register(name, 1, facts())
    queue.submit(spec())
    begin(queue, "w")
    claim = queue.claim("w", (TaskKind.trial,))
    assert claim is not None and alive(claim) == ["w"]
    with Session(engine) as session, session.begin():
        session.execute(update(Task).where(Task.id == claim.task_id).values(lease_until=1.0))
    assert queue.reap() == 1
    claim = queue.claim("v", (TaskKind.trial,))
    assert claim is not None and alive(claim) == ["v"]


def test_a_worker_that_was_not_seen_for_a_day_is_forgotten(engine: Engine, queue: Queue, facts: Facts) -> None:
    """Its machine is gone; one that was lost for a night may come back, and is shown until then."""
    hours = {"gone": 25.0, "away": 23.0, "here": 0.0}
    for name in hours:
        queue.register(name, 1, facts())
    with Session(engine) as session, session.begin():
        for name, one in hours.items():
            session.execute(update(Worker).where(Worker.id == name).values(seen_at=now(session) - 3600 * one))
    queue.reap()
    with Session(engine) as session:
        assert {one.id for one in jobs.workers(session, now(session))} == {"away", "here"}


def test_what_was_written_before_the_clock_was_set_back_keeps_nobody_waiting(
    engine: Engine, queue: Queue, spec: Spec, facts: Facts
) -> None:
    """A lease, and a pause after a death, end within minutes; a time days ahead would never come."""
    queue.submit(spec())
    queue.register("w", 1, facts())
    begin(queue, "w")
    claim = queue.claim("w", (TaskKind.trial,))
    assert isinstance(claim, TrialClaim)

    def put(**ahead: float) -> None:
        with Session(engine) as session, session.begin():
            moved = {name: now(session) + seconds for name, seconds in ahead.items()}
            session.execute(update(Task).where(Task.id == claim.task_id).values(**moved))

    put(lease_until=MOST_LEASE_SECONDS)
    assert queue.reap() == 0
    put(lease_until=3 * MOST_LEASE_SECONDS)
    assert queue.reap() == 1
    put(not_before=MOST_LEASE_SECONDS)
    assert queue.claim("w", (TaskKind.trial,)) is None
    put(not_before=3 * MOST_LEASE_SECONDS)
    assert queue.claim("w", (TaskKind.trial,)) is not None

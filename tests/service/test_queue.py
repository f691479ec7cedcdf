"""The queue on both databases, for workers that speak SQL or HTTP: leases, fence, reaper, plan wake-ups, wishes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from service import conclude, events, history, jobs
from service.conclude import MOST_DEATHS_OF_A_TASK
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.states import JobStatus, Origin, TaskState
from service.contract.task import (
    MOST_LOG,
    PlanClaim,
    PlanDecision,
    TaskKind,
    TrialClaim,
    TrialRequest,
    VerifyRequest,
    Wish,
)
from service.db import readonly
from service.enqueue import queue_plan
from service.errors import LeaseLost, NotFound, NotYet
from service.history import JobHistory
from service.leases import job_of
from service.models import Job, Task
from service.queue import Queue
from tests.factory import configuration, failed, measured
from tests.over_http import OverHttp

PLAN, TRIAL = (TaskKind.plan,), (TaskKind.trial, TaskKind.verify)
Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


def request(number: int = 1, **levers: Any) -> TrialRequest:
    return TrialRequest(configuration=configuration(**levers), origin=Origin.recipe, number=number)


def plan_trials(queue: Queue, worker: str, *requests: TrialRequest) -> PlanClaim:
    """Claim the open plan and have it queue these trials."""
    claim = queue.claim(worker, PLAN)
    assert isinstance(claim, PlanClaim)
    queue.plan_input(claim)
    queue.finish_plan(claim, PlanDecision(trials=requests))
    return claim


@pytest.fixture(params=["sql", "http"])
def queue(request: pytest.FixtureRequest, engine: Engine) -> Queue:
    return (Queue if request.param == "sql" else OverHttp)(engine, retry_seconds=0.0)


@pytest.fixture
def started(queue: Queue, facts: Facts, spec: Spec) -> str:
    """A job with one queued trial, and the worker 'w'."""
    queue.register("w", 1, facts())
    job_id = queue.submit(spec())
    plan_trials(queue, "w", request())
    return job_id


def status(engine: Engine, job_id: str) -> Job:
    with Session(engine) as session:
        return jobs.get(session, job_id)


def expire(engine: Engine, task_id: str) -> None:
    with Session(engine) as session, session.begin():
        session.execute(update(Task).where(Task.id == task_id).values(lease_until=1.0))


def test_a_job_starts_with_a_plan_and_binds_the_hardware(
    queue: Queue, engine: Engine, started: str, facts: Facts
) -> None:
    job = status(engine, started)
    assert job.status == "running" and job.fingerprint == facts().fingerprint
    queue.register("other", 2, facts(name="Other CPU"))
    assert queue.claim("other", TRIAL) is None  # timings of different hardware never mix within a job
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim) and claim.attempt == 1


def test_a_result_is_written_once(queue: Queue, engine: Engine, started: str) -> None:
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    queue.finish_trial(claim, measured(configuration()), "log")
    with pytest.raises(LeaseLost):
        queue.finish_trial(claim, measured(configuration(), 1.0), "late")
    with Session(engine) as session:
        (trial,) = jobs.trials(session, jobs.get(session, started))
    assert trial.measurement and trial.measurement.timing and trial.measurement.timing.seconds == 10.0


def test_a_result_is_of_its_own_job(queue: Queue, engine: Engine, started: str, spec: Callable[..., JobSpec]) -> None:
    """Written to another, it would leave its own without anything that goes on with it."""
    claim, other = queue.claim("w", TRIAL), queue.submit(spec())
    assert isinstance(claim, TrialClaim)
    with pytest.raises(LeaseLost):
        queue.finish_trial(claim.model_copy(update={"job_id": other}), measured(configuration()), "")
    queue.finish_trial(claim, measured(configuration()), "\0" + "x" * (1 << 20))
    with Session(engine) as session:
        (log,) = session.scalars(select(Task.log).where(Task.kind == TaskKind.trial, Task.job_id == started))
    assert log == "x" * MOST_LOG


def test_a_lost_lease_drops_the_result(queue: Queue, engine: Engine, started: str, facts: Facts) -> None:
    first = queue.claim("w", TRIAL)
    assert isinstance(first, TrialClaim)
    expire(engine, first.task_id)
    assert queue.reap() == 1
    queue.register("v", 2, facts())
    second = queue.claim("v", TRIAL)
    assert isinstance(second, TrialClaim) and second.task_id == first.task_id and second.attempt > first.attempt
    writes: tuple[Callable[[], object], ...] = (
        lambda: queue.finish_trial(first, measured(configuration(), 1.0), ""),
        lambda: queue.renew(first),
        lambda: queue.release(first),
        lambda: queue.fail(first, "no"),
    )
    for write in writes:
        with pytest.raises(LeaseLost):
            write()
    queue.finish_trial(second, measured(configuration()), "")
    assert status(engine, started).status == "running"


def test_reaping_leaves_the_living_alone(queue: Queue, engine: Engine, started: str) -> None:
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    assert queue.renew(claim, "probing", "a line\0") is None and queue.renew(claim) is None
    with Session(engine) as session:
        assert session.scalars(select(Task.log).where(Task.id == claim.task_id)).one() == "a line\\x00"
    assert queue.reap() == 0


def test_the_third_death_poisons_a_trial(queue: Queue, engine: Engine, started: str) -> None:
    for death in range(MOST_DEATHS_OF_A_TASK):
        claim = queue.claim("w", TRIAL)
        assert isinstance(claim, TrialClaim), f"not offered again after {death} deaths"
        expire(engine, claim.task_id)
        assert queue.reap() == 1
    assert queue.claim("w", TRIAL) is None
    with Session(engine) as session:
        (trial,) = jobs.trials(session, jobs.get(session, started))
    assert trial.measurement and trial.outcome == "crashed" and "workers died" in trial.measurement.reason
    assert queue.claim("w", PLAN) is not None  # the plan is told


def die(queue: Queue, engine: Engine, kinds: tuple[TaskKind, ...]) -> None:
    for _ in range(MOST_DEATHS_OF_A_TASK):
        claim = queue.claim("w", kinds)
        assert claim is not None
        expire(engine, claim.task_id)
        assert queue.reap() == 1
    assert queue.claim("w", kinds) is None


def test_a_plan_that_ends_its_workers_fails_the_job(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    queue.register("w", 1, facts())
    job_id = queue.submit(spec())
    die(queue, engine, PLAN)
    job = status(engine, job_id)
    assert job.status is JobStatus.failed and "Planning ended 3 workers" in (job.error or "")


def test_a_verification_that_ends_its_workers_leaves_the_best_unverified(
    queue: Queue, engine: Engine, started: str
) -> None:
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    good = measured(configuration())
    queue.finish_trial(claim, good, "")
    planning = queue.claim("w", PLAN)
    assert isinstance(planning, PlanClaim)
    queue.plan_input(planning)
    request = VerifyRequest(method="lora", baseline=good, finalists=(good,), blocks=1, seconds_limit=60)
    queue.finish_plan(planning, PlanDecision(verify=request))
    die(queue, engine, TRIAL)
    again = queue.claim("w", PLAN)
    assert isinstance(again, PlanClaim) and queue.plan_input(again).verified_methods == ("lora",)
    best = status(engine, started).recommendation
    assert best and best["stability"]["stable"] is None
    with Session(engine) as session:
        told = events.tail(session, started)[-1].data
    assert told["outcome"] == "crashed" and "workers died" in told["note"]


def test_a_released_task_is_no_death(queue: Queue, engine: Engine, started: str) -> None:
    for _ in range(MOST_DEATHS_OF_A_TASK + 1):
        claim = queue.claim("w", TRIAL)
        assert isinstance(claim, TrialClaim)
        queue.release(claim)
    with Session(engine) as session:
        assert session.scalar(select(Task.deaths).where(Task.kind == "trial")) == 0


def test_no_wake_up_is_lost(queue: Queue, engine: Engine, started: str) -> None:
    """A trial that ends while a plan is under way makes that plan queue another, not end the job."""
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    queue.finish_trial(claim, failed(configuration()), "")
    planning = queue.claim("w", PLAN)
    assert isinstance(planning, PlanClaim)
    queue.plan_input(planning)
    with Session(engine) as session, session.begin():  # as if another trial ended now
        session.execute(update(Job).where(Job.id == started).values(history_version=Job.history_version + 1))
    queue.finish_plan(planning, PlanDecision(finish=True, error="nothing"))
    assert status(engine, started).status == "running"
    again = queue.claim("w", PLAN)
    assert isinstance(again, PlanClaim)
    queue.plan_input(again)
    queue.finish_plan(again, PlanDecision(finish=True, error="nothing"))
    assert status(engine, started).status == "failed"


def test_one_open_plan_a_job(queue: Queue, engine: Engine, started: str) -> None:
    with Session(engine) as session, session.begin():
        for _ in range(3):
            queue_plan(session, job_of(session, started), 1.0)
        plans = session.scalars(select(Task).where(Task.kind == "plan", Task.state == "queued")).all()
    assert len(plans) == 1


def test_the_same_trial_is_queued_once(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    queue.register("w", 1, facts())
    queue.submit(spec())
    plan_trials(queue, "w", request(1), request(2))
    with Session(engine) as session:
        assert len(session.scalars(select(Task).where(Task.kind == "trial")).all()) == 1


def test_a_job_whose_plan_brings_nothing_new_ends_with_a_sentence(queue: Queue, engine: Engine, started: str) -> None:
    """Or it would run for ever, with no task that could end."""
    trial = queue.claim("w", TRIAL)
    assert isinstance(trial, TrialClaim)
    queue.finish_trial(trial, measured(trial.request.configuration), "")
    plan_trials(queue, "w", trial.request.model_copy(update={"number": 2}))
    job = status(engine, started)
    assert job.status is JobStatus.failed and "a defect of dynotune" in (job.error or "")
    assert job.recommendation is not None


def test_cancel_ends_at_once_and_tells_the_worker(queue: Queue, engine: Engine, started: str) -> None:
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    queue.cancel(started)
    assert status(engine, started).status == "cancelled"
    assert queue.renew(claim) is Wish.cancel
    queue.release(claim)
    assert queue.claim("w", TRIAL) is None
    queue.cancel(started)  # twice is no mistake
    with pytest.raises(NotYet):
        queue.stop(started)


def test_stop_keeps_what_was_learnt(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    queue.register("w", 1, facts())
    job_id = queue.submit(spec())
    plan_trials(queue, "w", request(1), request(2, batching="sorted"))
    first, second = queue.claim("w", TRIAL), queue.claim("w", TRIAL)
    assert isinstance(first, TrialClaim) and isinstance(second, TrialClaim)
    queue.finish_trial(first, measured(configuration()), "")
    assert queue.stop(job_id) == "succeeded"
    assert queue.renew(second) is Wish.stop
    job = status(engine, job_id)
    assert job.recommendation and job.recommendation["final"] is True
    assert job.recommendation["configuration"]["micro_batch_size"] == 8


def test_the_best_so_far_is_kept_with_every_trial(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    queue.register("w", 1, facts())
    job_id = queue.submit(spec())
    plan_trials(queue, "w", request(1), request(2, batching="sorted"), request(3, batching="packed"))
    runs: tuple[tuple[dict[str, Any], float, float], ...] = (
        ({}, 10.0, 10.0),
        ({"batching": "sorted"}, 5.0, 5.0),
        ({"batching": "packed"}, 7.0, 5.0),
    )
    for levers, seconds, fastest in runs:
        claim = queue.claim("w", TRIAL)
        assert isinstance(claim, TrialClaim)
        queue.finish_trial(claim, measured(configuration(**levers), seconds), "")
        best = status(engine, job_id).recommendation
        assert best and best["final"] is False
        assert best["evidence"]["measurement"]["timing"]["seconds"] == fastest
    planning = queue.claim("w", PLAN)
    assert isinstance(planning, PlanClaim)
    queue.plan_input(planning)
    queue.finish_plan(planning, PlanDecision(notes=("the moon is full",)))
    assert "the moon is full" in (status(engine, job_id).recommendation or {})["notes"]


def test_what_ends_while_a_recommendation_is_computed_is_in_it(
    queue: Queue, engine: Engine, facts: Facts, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trials end at once. No transaction is open while the first is computed, and it is computed again."""
    queue.register("w", 1, facts())
    job_id = queue.submit(spec())
    plan_trials(queue, "w", request(1), request(2, batching="sorted"))
    first, second = queue.claim("w", TRIAL), queue.claim("w", TRIAL)
    assert isinstance(first, TrialClaim) and isinstance(second, TrialClaim)
    compute, seen = conclude.best, []

    def best(known: JobHistory, final: bool) -> Any:
        seen.append(len(known.trials))
        if len(seen) == 1:  # on SQLite this would wait 30 s and fail if a write were open
            queue.finish_trial(second, measured(configuration(batching="sorted"), 5.0), "")
        return compute(known, final)

    monkeypatch.setattr(conclude, "best", best)
    queue.finish_trial(first, measured(configuration(), 10.0), "")
    assert seen == [1, 1, 2]
    found = status(engine, job_id).recommendation
    assert found and found["evidence"]["measurement"]["timing"]["seconds"] == 5.0 and len(found["alternatives"]) == 1


def test_stop_before_the_first_trial_fails_with_a_sentence(queue: Queue, engine: Engine, started: str) -> None:
    assert queue.stop(started) == "failed"
    assert "before any trial" in (status(engine, started).error or "")


def test_a_failed_job_keeps_its_best(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    queue.register("w", 1, facts())
    job_id = queue.submit(spec())
    plan_trials(queue, "w", request(1), request(2, batching="sorted"))
    first, second = queue.claim("w", TRIAL), queue.claim("w", TRIAL)
    assert isinstance(first, TrialClaim) and isinstance(second, TrialClaim)
    queue.finish_trial(first, measured(configuration()), "")
    queue.fail(second, "the disk is full")
    job = status(engine, job_id)
    assert job.status == "failed" and job.error == "the disk is full" and job.recommendation is not None


@pytest.mark.parametrize(
    ("hardware", "served"),
    [
        ({"device": "cuda"}, False),
        ({"device": "cpu"}, True),
        ({"name": "test"}, True),
        ({"name": "H200"}, False),
        ({"memory_gib": 15}, True),
        ({"memory_gib": 17}, False),
    ],
)
def test_only_fitting_hardware_is_offered_a_job(
    queue: Queue, facts: Facts, spec: Spec, hardware: dict[str, object], served: bool
) -> None:
    queue.register("w", 1, facts())
    queue.submit(spec(hardware=hardware))
    assert (queue.claim("w", PLAN) is not None) is served


def test_concurrent_claims_never_share_a_task(queue: Queue, facts: Facts, spec: Spec) -> None:
    for number in range(4):
        queue.register(f"w{number}", number, facts())
    for _ in range(12):
        queue.submit(spec())
    claimed: list[str] = []

    def work(worker: str) -> None:
        while (claim := queue.claim(worker, PLAN)) is not None:
            claimed.append(claim.task_id)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A claim may come back empty while another worker holds the job's row, so the rest is fetched here.
    work("w0")
    assert len(claimed) == len(set(claimed)) == 12


def test_what_is_read_is_of_one_moment(queue: Queue, engine: Engine, started: str) -> None:
    """A trial that ends between two queries of a reader is either under way in both, or ended in both."""
    claim = queue.claim("w", TRIAL)
    assert isinstance(claim, TrialClaim)
    with Session(readonly(engine)) as session, session.begin():
        (before,) = session.scalars(select(Task).where(Task.kind == TaskKind.trial)).all()
        queue.finish_trial(claim, measured(configuration()), "")
        assert before.state is TaskState.running and history.load(session, started).trials == ()


def test_unknown_jobs_are_not_found(queue: Queue) -> None:
    for ask in (queue.cancel, queue.stop):
        with pytest.raises(NotFound, match="no job"):
            ask("nothing")

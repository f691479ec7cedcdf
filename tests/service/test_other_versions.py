"""What another version of dynotune stored costs at most the job that it is of, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from service.contract.estimate import EstimateRequest
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.states import JobPhase, Origin
from service.contract.task import EstimateClaim, PlanClaim, PlanDecision, TaskKind, TrialClaim, TrialRequest
from service.errors import LeaseLost, OtherVersion
from service.exports import EXPORTS
from service.foresight import _typical
from service.levers import LEVERS
from service.metrics import Metrics
from service.models import Job, Task, Worker
from service.queue import Queue
from tests.factory import configuration, measured
from tests.service.test_earlier import finish, planned

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


@pytest.fixture
def worker(queue: Queue, facts: Facts) -> str:
    queue.register("w", 1, facts())
    return "w"


def spoil(engine: Engine, job_id: str | None = None) -> None:
    """Give the stored jobs, or one of them, a field that this version does not know."""
    with Session(engine) as session, session.begin():
        for row in session.query(Job).where(Job.id == job_id if job_id else Job.id.is_not(None)):
            row.spec = row.spec | {"invented_later": 1}


def test_a_recommendation_of_another_version_is_told(
    api: TestClient, queue: Queue, engine: Engine, spec: Spec, worker: str
) -> None:
    finish(queue, spec())
    with Session(engine) as session, session.begin():
        (job,) = session.query(Job)
        job.recommendation = (job.recommendation or {}) | {"invented_later": 1}
        job_id = job.id
    for path in ("", "/recommendation"):
        answer = api.get(f"/v1/jobs/{job_id}{path}")
        assert (
            answer.status_code == OtherVersion.status and "Another version of dynotune wrote" in answer.json()["detail"]
        )
    listed = api.get(f"/v1/jobs/{job_id}/trials")
    assert listed.status_code == 200 and not any(one["fastest"] for one in listed.json()["items"])


def with_a_trial(queue: Queue, worker: str) -> tuple[tuple[TrialRequest, ...], TrialClaim]:
    """Plan the only job's first two trials and end one of them; the requests, and the other one's claim."""
    plan, _ = planned(queue)
    requests = tuple(
        TrialRequest(configuration=configuration(effective=size), origin=Origin.baseline, number=number)
        for number, size in ((1, 32), (2, 64))
    )
    queue.finish_plan(plan, PlanDecision(trials=requests, phase=JobPhase.searching))
    first, second = (queue.claim(worker, (TaskKind.trial,)) for _ in requests)
    assert isinstance(first, TrialClaim) and isinstance(second, TrialClaim)
    queue.finish_trial(first, measured(requests[0].configuration), "")
    return requests, second


def without_a_lever(kept: Any) -> Any:
    """Stored JSON, as the version before `loading` came had stored it."""
    if isinstance(kept, list):
        return [without_a_lever(one) for one in kept]
    if not isinstance(kept, dict):
        return kept
    return {name: without_a_lever(one) for name, one in kept.items() if name != "loading"}


def test_a_job_from_before_a_lever_came_goes_on_and_keeps_its_exports(
    api: TestClient, queue: Queue, engine: Engine, spec: Spec, worker: str
) -> None:
    """An update brings levers: what was measured before had them as their baselines are."""
    finish(queue, spec())
    job_id = queue.submit(spec(name="under way", search={"reuse": False}))
    asked, open_trial = with_a_trial(queue, worker)
    queue.release(open_trial)
    with Session(engine) as session, session.begin():
        for row in [*session.query(Job), *session.query(Task)]:
            for name in ("recommendation", "payload", "result"):
                if kept := getattr(row, name, None):
                    setattr(row, name, without_a_lever(kept))
        old = next(one.id for one in session.query(Job) if one.id != job_id)
    best = api.get(f"/v1/jobs/{old}/recommendation")
    assert best.json()["configuration"]["levers"]["loading"] == LEVERS["loading"].baseline
    for name in EXPORTS:
        assert api.get(f"/v1/jobs/{old}/exports/{name}").status_code == 200, name
    second = queue.claim(worker, (TaskKind.trial,))
    assert isinstance(second, TrialClaim) and second.request == asked[1]
    _, known = planned(queue)
    assert known.history[0].request == asked[0] and known.history[0].measurement.configuration == asked[0].configuration
    assert known.open_trials == (asked[1],)


def test_a_recommendation_with_a_choice_that_is_no_more_is_told(
    api: TestClient, queue: Queue, engine: Engine, spec: Spec, worker: str
) -> None:
    finish(queue, spec())
    with Session(engine) as session, session.begin():
        (job,) = session.query(Job)
        kept = job.recommendation or {}
        levers = kept["configuration"]["levers"] | {"optimizer": "adamw-9bit"}
        job.recommendation = kept | {"configuration": kept["configuration"] | {"levers": levers}}
        job_id = job.id
    for path in ("recommendation", "exports/train.py"):
        answer = api.get(f"/v1/jobs/{job_id}/{path}")
        assert answer.status_code == OtherVersion.status and "Another version" in answer.json()["detail"]


def test_a_finished_job_of_another_version_is_passed_over(
    queue: Queue, engine: Engine, spec: Spec, facts: Facts, worker: str
) -> None:
    finish(queue, spec())
    spoil(engine)
    queue.submit(spec(name="next"))
    _, known = planned(queue)
    assert known.earlier == ()
    asked = EstimateRequest(spec=spec(), memory_gib=8)
    queue.submit_estimate(asked)
    claim = queue.claim(worker, (TaskKind.estimate,))
    assert isinstance(claim, EstimateClaim) and claim.known == ()
    with Session(engine) as session:
        workers = session.query(Worker).all()
        assert _typical(session, spec(), workers) is None
    assert b"dynotune_best_speedup" in Metrics(engine)()


def test_a_measurement_of_another_version_is_passed_over(queue: Queue, engine: Engine, spec: Spec, worker: str) -> None:
    finish(queue, spec())
    with Session(engine) as session, session.begin():
        session.execute(update(Task).where(Task.kind == TaskKind.trial).values(result={"invented_later": 1}))
    queue.submit(spec(name="next"))
    assert planned(queue)[1].earlier == ()


def test_a_waiting_job_of_another_version_fails_and_the_next_is_served(
    queue: Queue, engine: Engine, spec: Spec, worker: str
) -> None:
    spoilt, sound = queue.submit(spec(name="spoilt")), queue.submit(spec(name="sound"))
    spoil(engine, spoilt)
    assert queue.claim(worker, (TaskKind.plan,)) is None, "its turn ends it"
    claim = queue.claim(worker, (TaskKind.plan,))
    assert claim is not None and claim.kind is TaskKind.plan and claim.job_id == sound
    with Session(engine) as session:
        ended = session.query(Job).where(Job.id == spoilt).one()
        assert ended.status == "failed" and "Another version of dynotune wrote this job" in (ended.error or "")


def test_a_job_on_a_kind_of_device_that_is_refused_today_can_be_seen_and_ended(
    api: TestClient, queue: Queue, engine: Engine, job: Callable[..., dict[str, Any]]
) -> None:
    """`gpu` was accepted once, and waited for a worker that there is none of."""
    path = f"/v1/jobs/{api.post('/v1/jobs', json=job()).json()['id']}"
    with Session(engine) as session, session.begin():
        for row in session.query(Job):
            row.spec = row.spec | {"hardware": {"device": "gpu"}}
    assert api.get(path).json()["spec"]["hardware"]["device"] == "gpu"
    assert api.post(f"{path}/cancel").status_code < 300 and api.get(path).json()["status"] == "cancelled"
    assert api.delete(path).status_code == 204


def spoil_trial(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.execute(update(Task).where(Task.kind == TaskKind.trial).values(result={"invented_later": 1}))


@pytest.mark.parametrize("ended_by", ["plan", "cancel", "stop", "fail", "reap"])
def test_a_running_job_with_a_trial_of_another_version_can_be_ended(
    queue: Queue, engine: Engine, spec: Spec, worker: str, ended_by: str
) -> None:
    """By whatever ends it: its history cannot be read, so it ends without a recommendation."""
    job_id = queue.submit(spec())
    _, second = with_a_trial(queue, worker)
    spoil_trial(engine)
    if ended_by == "plan":
        claim = queue.claim(worker, (TaskKind.plan,))
        assert isinstance(claim, PlanClaim)
        with pytest.raises(LeaseLost, match="Another version"):
            queue.plan_input(claim)
    elif ended_by in ("cancel", "stop"):
        getattr(queue, ended_by)(job_id)
    elif ended_by == "fail":
        queue.fail(second, "no disk")
    else:
        with Session(engine) as session, session.begin():
            session.execute(update(Task).where(Task.id == second.task_id).values(lease_until=1.0, deaths=2))
        assert queue.reap() == 1
    with Session(engine) as session:
        assert session.query(Job).where(Job.id == job_id).one().status.ended


def test_a_worker_on_the_database_leaves_what_it_cannot_read_to_others(
    queue: Queue, engine: Engine, spec: Spec, worker: str
) -> None:
    """It may be the one of an older version, which would end every new job."""
    job_id = queue.submit(spec())
    spoil(engine, job_id)
    with pytest.raises(OtherVersion, match=job_id):
        Queue(engine, is_of_a_worker=True).claim(worker, (TaskKind.plan,))
    with Session(engine) as session:
        assert session.query(Job).where(Job.id == job_id).one().status == "queued"
        assert session.query(Task).one().state == "queued"


@pytest.mark.parametrize("at", ["plan", "trial"])
def test_a_worker_on_the_database_fails_no_job_that_others_have_measured(
    queue: Queue, engine: Engine, spec: Spec, worker: str, at: str
) -> None:
    """One new field of a measurement was enough: a worker of the older version failed a job that was nearly done."""
    queue.submit(spec())
    _, second = with_a_trial(queue, worker)
    spoil_trial(engine)
    old = Queue(engine, is_of_a_worker=True)
    with pytest.raises(OtherVersion, match="bring both to one version"):
        if at == "plan":
            claim = old.claim(worker, (TaskKind.plan,))
            assert isinstance(claim, PlanClaim)
            old.plan_input(claim)
        else:
            old.finish_trial(second, measured(configuration(micro=4)), "")
    with Session(engine) as session:
        assert session.query(Job).one().status == "running"
        states = {one.state for one in session.query(Task).where(Task.kind == at)}
        assert states == {"done", "running"}, "whoever runs the task hands it back"


def test_a_dead_workers_task_of_another_version_is_ended(queue: Queue, engine: Engine, spec: Spec, worker: str) -> None:
    job_id = queue.submit(spec())
    assert queue.claim(worker, (TaskKind.plan,)) is not None
    spoil(engine, job_id)
    with Session(engine) as session, session.begin():
        session.execute(update(Task).values(lease_until=1.0))
    assert Queue(engine, is_of_a_worker=True).reap() == 0
    with Session(engine) as session:
        assert session.query(Job).one().status == "running", "a worker may be the one of an older version"
    assert queue.reap() == 0
    with Session(engine) as session:
        assert session.query(Job).where(Job.id == job_id).one().status == "failed"


def test_a_job_of_another_version_is_told_as_that(
    api: TestClient, queue: Queue, engine: Engine, job: Callable[..., dict[str, Any]]
) -> None:
    path = f"/v1/jobs/{api.post('/v1/jobs', json=job()).json()['id']}"
    spoil(engine)
    answer = api.get(path)
    assert answer.status_code == 426 and "Another version of dynotune wrote this job" in answer.json()["detail"]
    assert api.post(f"{path}/cancel").status_code == 202 and api.delete(path).status_code == 204

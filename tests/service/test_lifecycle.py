"""A job from its submission to its deletion: repeated, ordered by priority, cloned, kept and deleted; draining."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, func, select, update
from sqlalchemy.orm import Session

from service import enqueue
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.task import PlanClaim, PlanDecision, TaskKind, TrialClaim
from service.errors import Drained, LeaseLost
from service.jobs import summary
from service.models import Event, Job, JobLabel, Need, Submission, Task
from service.queue import Queue
from tests.factory import configuration, measured
from tests.service.test_api import run_trial, submit

Make = Callable[..., dict[str, Any]]
Facts = Callable[..., HardwareFacts]
PLANS = (TaskKind.plan,)


def test_a_submission_under_a_key_is_made_once(api: TestClient, engine: Engine, job: Make) -> None:
    key = {"Idempotency-Key": "once"}
    first, again = (api.post("/v1/jobs", json=job(), headers=key) for _ in range(2))
    assert first.status_code == again.status_code == 202 and first.json() == again.json()
    other = api.post("/v1/jobs", json=job(name="other"), headers=key)
    assert other.status_code == 422 and other.json()["code"] == "idempotency-key-reused"
    assert first.json()["id"] in other.json()["detail"]
    assert api.post("/v1/jobs", json=job(), headers={"Idempotency-Key": "two"}).json() != first.json()
    with Session(engine) as session:
        assert session.scalar(select(func.count()).select_from(Job)) == 2
    api.post(f"/v1/jobs/{first.json()['id']}/cancel")
    assert api.post("/v1/jobs", json=job(), headers=key).json() == first.json() | {"status": "cancelled"}
    path, copied = f"/v1/jobs/{first.json()['id']}/clone", {"Idempotency-Key": "copied"}
    copy = api.post(path, json={}, headers=copied).json()
    assert copy["status"] == "queued"
    api.post(f"/v1/jobs/{copy['id']}/cancel")
    assert api.post(path, json={}, headers=copied).json() == copy | {"status": "cancelled"}


def test_a_job_that_never_began_took_no_time(api: TestClient, engine: Engine, job: Make) -> None:
    name = api.post("/v1/jobs", json=job()).json()["id"]
    assert api.post(f"/v1/jobs/{name}/cancel").is_success
    with Session(engine) as session:
        found = session.scalars(select(Job)).one()
        assert summary(found, found.created_at + 3600).elapsed_seconds == 0


def test_an_idempotency_key_is_forgotten_after_a_day(queue: Queue, engine: Engine, job: Make) -> None:
    spec = JobSpec.model_validate(job())
    first = queue.submit(spec, idempotency_key="k")
    queue.prune(None)
    assert queue.submit(spec, idempotency_key="k") == first
    with Session(engine) as session, session.begin():
        session.execute(update(Submission).values(created_at=1.0))
    queue.prune(None)
    assert queue.submit(spec, idempotency_key="k") != first


def test_the_same_key_at_the_same_moment(queue: Queue, engine: Engine, job: Make, monkeypatch: Any) -> None:
    """The other submission is written between this one's look and its write."""
    spec = JobSpec.model_validate(job())
    looks = Session.get
    first: list[str] = []

    def late(self: Session, entity: Any, key: Any, **more: Any) -> Any:
        found = looks(self, entity, key, **more)
        if entity is Submission and not first:
            first.append("")
            if engine.dialect.name == "postgresql":  # SQLite has one writer, so nothing can come between
                first[0] = queue.submit(spec, idempotency_key="k")
        return found

    monkeypatch.setattr(Session, "get", late)
    made = queue.submit(spec, idempotency_key="k")
    assert first[0] in ("", made)


def test_priorities_then_age_and_nobody_waits_for_ever(queue: Queue, engine: Engine, facts: Facts, job: Make) -> None:
    names = {"old": (0, -7200.0), "middle": (1, -600.0), "new": (2, 0.0), "low": (-1, -60.0), "ancient": (-1, -90000.0)}
    for name, (priority, _) in names.items():
        queue.submit(JobSpec.model_validate(job(name=name, priority=priority)))
    with Session(engine) as session, session.begin():
        for name, (_, moved) in names.items():
            mine = select(Job.id).where(Job.name == name).scalar_subquery()
            session.execute(update(Task).where(Task.job_id == mine).values(place=Task.place + moved))
    queue.register("w", 1, facts())
    order = []
    while (claim := queue.claim("w", PLANS)) is not None:
        assert isinstance(claim, PlanClaim)
        order.append(claim.spec.name)
    assert order == ["ancient", "old", "new", "middle", "low"]


def test_a_task_rests_after_a_death(engine: Engine, facts: Facts, job: Make) -> None:
    moment = [1000.0]
    queue = Queue(engine, clock=lambda: moment[0], retry_seconds=10.0)
    queue.submit(JobSpec.model_validate(job()))
    queue.register("w", 1, facts())
    for longest in (10.0, 20.0):
        assert queue.claim("w", PLANS) is not None
        with Session(engine) as session, session.begin():
            session.execute(update(Task).values(lease_until=1.0))
        assert queue.reap() == 1 and queue.claim("w", PLANS) is None
        with Session(engine) as session, session.begin():
            died = session.scalar(select(func.max(Event.at)).where(Event.kind == "worker-died"))
            rest = session.scalars(select(Task.not_before)).one()
            assert died is not None and rest is not None and longest / 2 <= rest - died <= longest
            session.execute(update(Task).values(not_before=died))


def test_what_has_ended_can_be_deleted(api: TestClient, queue: Queue, engine: Engine, facts: Facts, job: Make) -> None:
    job_id = submit(api, job(labels={"a": "b"}))
    queue.register("w", 1, facts())
    run_trial(queue, 8.0, 1)
    open_still = api.delete(f"/v1/jobs/{job_id}")
    assert open_still.status_code == 409 and "cancel it before" in open_still.json()["detail"]
    api.post(f"/v1/jobs/{job_id}/stop")
    gone = api.delete(f"/v1/jobs/{job_id}")
    assert gone.status_code == 204 and gone.content == b""
    assert api.get(f"/v1/jobs/{job_id}").status_code == 404 and api.delete(f"/v1/jobs/{job_id}").status_code == 404
    with Session(engine) as session:
        for table in (Job, JobLabel, Task, Event):
            assert session.scalar(select(func.count()).select_from(table)) == 0, table


def test_the_worker_of_a_deleted_job_has_lost_its_lease(queue: Queue, facts: Facts, job: Make) -> None:
    job_id = queue.submit(JobSpec.model_validate(job()))
    queue.register("w", 1, facts())
    plan = queue.claim("w", PLANS)
    assert isinstance(plan, PlanClaim)
    queue.cancel(job_id)
    queue.delete(job_id)
    trial = TrialClaim.model_validate(
        {
            "task_id": plan.task_id,
            "attempt": 1,
            "job_id": job_id,
            "spec": plan.spec,
            "request": {"configuration": configuration().model_dump(), "origin": "search", "number": 1},
        }
    )
    writes: tuple[Callable[[], Any], ...] = (
        lambda: queue.renew(plan),
        lambda: queue.plan_input(plan),
        lambda: queue.finish_plan(plan, PlanDecision(finish=True)),
        lambda: queue.finish_trial(trial, measured(configuration(), 1.0), ""),
        lambda: queue.release(plan),
        lambda: queue.fail(plan, "why"),
    )
    for write in writes:
        with pytest.raises(LeaseLost):
            write()


def test_ended_jobs_are_kept_as_long_as_asked(api: TestClient, queue: Queue, engine: Engine, job: Make) -> None:
    old, new, still_open = (submit(api, job()) for _ in range(3))
    for one in (old, new):
        api.post(f"/v1/jobs/{one}/cancel")
    with Session(engine) as session, session.begin():
        session.execute(update(Job).where(Job.id == old).values(finished_at=Job.finished_at - 3 * 86400))
    assert queue.prune(None) == 0
    assert queue.prune(2 * 86400.0) == 1
    assert {one["id"] for one in api.get("/v1/jobs").json()["items"]} == {new, still_open}


def test_what_no_open_task_needs_is_forgotten(queue: Queue, engine: Engine, job: Make, facts: Facts) -> None:
    """A job waits, one was begun on a worker's hardware, and one was cancelled; each needed another memory."""
    waits, begun, cancelled = (
        queue.submit(JobSpec.model_validate(job(hardware={"memory_gib": gib}))) for gib in (3.0, 2.0, 5.0)
    )
    queue.cancel(cancelled)
    queue.register("small", 1, facts(memory_bytes=2 << 30))
    claim = queue.claim("small", PLANS)
    assert isinstance(claim, PlanClaim) and claim.job_id == begun
    queue.prune(None)
    with Session(engine) as session:
        left = session.execute(select(Need.bytes, Need.fingerprint)).all()
    assert sorted(one.bytes / 2**30 for one in left) == [2.0, 3.0]
    queue.release(claim)
    queue.register("large", 2, facts(memory_bytes=4 << 30))
    others = queue.claim("small", PLANS), queue.claim("large", PLANS)
    assert [one.job_id for one in others if isinstance(one, PlanClaim)] == [begun, waits]


def test_a_need_is_kept_for_a_submission_under_way(
    queue: Queue, job: Make, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pruning comes when the submission has found the row of its need, and has not yet queued its task."""
    spec = JobSpec.model_validate(job())
    queue.cancel(queue.submit(spec))  # the row of what it needed stays until it is pruned
    pruning = threading.Thread(target=lambda: queue.prune(None))

    def late(*of_task: Any, plain: Any = enqueue._queue, **more: Any) -> Any:
        pruning.start()
        pruning.join(0.3)  # without the submission's task it would be over by now
        return plain(*of_task, **more)

    monkeypatch.setattr(enqueue, "_queue", late)
    queue.submit(spec)
    pruning.join()
    queue.register("w", 1, facts())
    assert queue.claim("w", PLANS) is not None


def test_a_job_is_submitted_again_with_changes(api: TestClient, job: Make) -> None:
    first = submit(api, job(labels={"a": "b"}))
    changes = {"name": "longer", "labels": {"a": None}, "search": {"minutes": 7}}
    same, changed = api.post(f"/v1/jobs/{first}/clone"), api.post(f"/v1/jobs/{first}/clone", json=changes)
    specs = [api.get(one.headers["location"]).json()["spec"] for one in (same, changed)]
    before = api.get(f"/v1/jobs/{first}").json()["spec"]
    assert specs[0] == before
    assert (specs[1]["name"], specs[1]["labels"], specs[1]["search"]["minutes"]) == ("longer", {}, 7)
    assert specs[1]["search"]["trials"] == before["search"]["trials"] and specs[1]["model"] == before["model"]
    wrong = api.post(f"/v1/jobs/{first}/clone", json={"search": {"minutes": -1}, "methods": "lora"})
    assert wrong.status_code == 422 and {one["pointer"] for one in wrong.json()["errors"]} == {
        "/search/minutes",
        "/methods",
    }


def test_a_drained_worker_gets_nothing_further(api: TestClient, queue: Queue, facts: Facts, job: Make) -> None:
    queue.register("w", 1, facts())
    submit(api, job())
    claim = queue.claim("w", PLANS)
    assert isinstance(claim, PlanClaim)
    assert api.post("/v1/workers/w/drain").status_code == 204
    assert api.post("/v1/workers/x/drain").status_code == 404
    queue.renew(claim)  # what it does, it finishes
    queue.finish_plan(claim, PlanDecision(trials=()))
    submit(api, job())
    with pytest.raises(Drained):
        queue.claim("w", PLANS)
    (worker,) = api.get("/v1/workers").json()["items"]
    assert worker["draining"]
    last = api.get("/v1/jobs").json()["items"][0]["id"]
    assert api.get(f"/v1/jobs/{last}").json()["waiting_for"] == "No connected worker can serve it: w is about to end."


def test_a_job_without_an_answer_has_none_that_a_condition_finds(queue: Queue, engine: Engine, job: Make) -> None:
    queue.cancel(queue.submit(JobSpec.model_validate(job())))
    with Session(engine) as session:
        nothing = (Job.recommendation.is_(None), Job.notes.is_(None), Job.facts.is_(None))
        assert session.scalars(select(Job.status).where(*nothing)).one() == "cancelled"

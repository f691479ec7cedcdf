"""Claims by needs: the order over several needs, and a cost that does not grow with tasks that nobody can serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, insert, text
from sqlalchemy.orm import Session

from service import leases
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.states import TaskState
from service.contract.task import PlanClaim, TaskKind
from service.enqueue import hardware
from service.models import Job, Need, Task
from service.queue import Queue
from service.tuples import WORKER, WorkerRow, first

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]
PLANS = (TaskKind.plan, TaskKind.estimate)
UNFIT = 5_000


def claimed_job(queue: Queue, worker: str = "w") -> str | None:
    claim = queue.claim(worker, PLANS)
    assert claim is None or isinstance(claim, PlanClaim)
    return claim.job_id if claim else None


def test_the_oldest_that_fits_is_next_whatever_it_needs(queue: Queue, facts: Facts, spec: Spec) -> None:
    queue.register("w", 1, facts(name="NVIDIA H100 80GB", device="cuda", memory_bytes=80 << 30))
    needs: list[dict[str, Any]] = [
        {"name": "H200"},
        {"device": "cuda"},
        {},
        {"memory_gib": 100},
        {"name": "h100"},
        {"device": "cpu"},
        {"memory_gib": 24},
    ]
    jobs = [queue.submit(spec(hardware=one)) for one in needs]
    assert [claimed_job(queue) for _ in range(5)] == [jobs[1], jobs[2], jobs[4], jobs[6], None]


@pytest.mark.parametrize("name", ["H_00", "h%", "\\", "H100%"])
def test_a_name_is_no_pattern(queue: Queue, facts: Facts, spec: Spec, name: str) -> None:
    queue.register("w", 1, facts(name="NVIDIA H100"))
    queue.register("v", 2, facts(name=f"NVIDIA {name} x"))
    job = queue.submit(spec(hardware={"name": name}))
    assert claimed_job(queue) is None and claimed_job(queue, "v") == job


@pytest.fixture
def crowded(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> Queue:
    """A queue in which thousands of plans of hardware that is not there stand before one that fits."""
    queue.register("w", 1, facts())
    first = queue.submit(spec(hardware={"name": "H200"}))
    with Session(engine) as session, session.begin():
        job = session.query(Job).filter(Job.id == first).one()
        task = session.query(Task).one()
        rows = [
            {column.name: getattr(job, column.name) for column in Job.__table__.columns if column.name != "seq"}
            | {"id": f"j{number}"}
            for number in range(UNFIT)
        ]
        session.execute(insert(Job), rows)
        tasks = [
            {column.name: getattr(task, column.name) for column in Task.__table__.columns if column.name != "seq"}
            | {"id": f"t{number}", "job_id": f"j{number}", "place": job.created_at + 1 + number}
            for number in range(UNFIT)
        ]
        session.execute(insert(Task), tasks)
    queue.submit(spec(name="fits"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    return queue


def plan_of(session: Session, statement: Any) -> str:
    """How the database carries out the very statement of a claim."""
    bound = statement.compile(session.get_bind(), compile_kwargs={"literal_binds": True})
    kind = "EXPLAIN (ANALYZE, TIMING OFF)" if session.get_bind().dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    rows = session.connection().exec_driver_sql(f"{kind} {bound}").all()
    return "\n".join(str(row[-1]) for row in rows)


def test_a_claim_reads_no_task_that_it_cannot_serve(crowded: Queue, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        worker = first(session, WorkerRow, WORKER, {"worker": "w"})
        assert worker is not None
        unfit = session.query(Need).filter(Need.name == "h200").one().key
        known = {**hardware(worker), "now": 0.0, "needed": unfit}
        for statement in (leases.heads(PLANS), leases.waiting(TaskKind.plan)):
            plan = plan_of(session, statement.params(known))
            assert "ix_tasks_claimable" in plan, plan
            assert "SCAN tasks" not in plan and "Seq Scan on tasks" not in plan and "Sort" not in plan, plan
            assert "TEMP B-TREE" not in plan, plan
    claim = crowded.claim("w", PLANS)
    assert isinstance(claim, PlanClaim) and claim.spec.name == "fits"
    assert crowded.claim("w", PLANS) is None


def test_a_job_that_has_begun_stays_on_its_hardware(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    queue.register("w", 1, facts())
    queue.register("v", 2, facts(name="Another CPU"))
    job = queue.submit(spec())
    claim = queue.claim("w", PLANS)
    assert isinstance(claim, PlanClaim) and claim.job_id == job
    queue.release(claim)
    assert claimed_job(queue, "v") is None and claimed_job(queue, "w") == job
    with Session(engine) as session:
        assert session.query(Task).filter(Task.state == TaskState.running).count() == 1


def test_the_claim_uses_the_partial_index(engine: Engine) -> None:
    query = "SELECT seq FROM tasks WHERE state = 'queued' ORDER BY rank, place, seq LIMIT 1"
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SET enable_seqscan = off"))  # a handful of rows would be scanned
        explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
        assert "ix_tasks_claimable" in str(connection.execute(text(f"{explain} {query}")).all())


def test_older_jobs_come_first(queue: Queue, facts: Facts, spec: Spec) -> None:
    queue.register("w", 1, facts())
    first, second = queue.submit(spec()), queue.submit(spec())
    claims = [queue.claim("w", PLANS), queue.claim("w", PLANS)]
    assert [claim.job_id for claim in claims if isinstance(claim, PlanClaim)] == [first, second]

"""Leases on tasks: leasing a task to a worker, describing it, and writing to it only while the lease is valid."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    CursorResult,
    Select,
    func,
    literal_column,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.orm import Session

from service.contract.states import TaskState
from service.contract.task import Claim, TaskKind
from service.counters import STALE_WRITES
from service.enqueue import servable
from service.errors import LeaseLost, NotFound
from service.models import Job, Need, Task, Worker

QUEUED = Task.state == literal_column("'queued'")
ORDER = (Task.rank, Task.place, Task.seq)
TRIES = 5  # of a claim: on PostgreSQL, others may take the very tasks that it has just seen
RUNNING = Task.state == literal_column("'running'")


def job_of(session: Session, job_id: str, lock: bool = True) -> Job:
    """The job's row, with `lock` locked until the transaction ends; NotFound when there is no such job."""
    query = select(Job).where(Job.id == job_id)
    job = session.scalars(query.with_for_update() if lock else query).one_or_none()
    if job is None:
        raise NotFound(f"There is no job {job_id!r}.")
    return job


def take(session: Session, worker: Worker, kinds: tuple[TaskKind, ...], now: float, lease_until: float) -> Task | None:
    """Lease the next task that the worker's hardware can serve: a job's if there is one, else an estimate."""
    order = (Task.job_id.is_(None), *ORDER)
    for _ in range(TRIES):
        seqs = [seq for seq in session.execute(heads(worker, kinds, now)).scalars() if seq is not None]
        if not seqs:
            return None
        firsts = select(Task.need, Task.kind).where(Task.seq.in_(seqs)).order_by(*order)
        for need, kind in session.execute(firsts).all():
            task = _lease(session, waiting(need, kind, now), worker, now, lease_until)
            if task is not None:
                return task
    return None


def heads(worker: Worker, kinds: tuple[TaskKind, ...], now: float) -> CompoundSelect[Any]:
    """For each need that the worker meets, and each kind, the number of the first task that waits, or NULL."""
    firsts = (
        select(Task.seq).where(QUEUED, Task.need == Need.key, Task.kind == kind, ready(now)).order_by(*ORDER).limit(1)
        for kind in kinds
    )
    meets = servable(worker)
    return union_all(*(select(first.correlate(Need).scalar_subquery()).where(*meets) for first in firsts))


def ready(now: float) -> ColumnElement[bool]:
    """The condition that a task need not wait any longer after a worker's death."""
    return or_(Task.not_before.is_(None), Task.not_before <= now)


def waiting(need: str, kind: TaskKind, now: float) -> Select[Any]:
    """The next task of a need and a kind, locked; one that another worker claims in this moment is passed over."""
    first = select(Task.seq).where(QUEUED, Task.need == need, Task.kind == kind, ready(now))
    wanted = first.order_by(*ORDER).limit(1)
    if kind is TaskKind.estimate:
        return wanted.with_for_update(skip_locked=True)
    # The job's row is locked together with the task's. A claim that held only the task's lock and then waited for the
    # job's would deadlock with the end of a task, which locks the job first.
    return wanted.join(Job, Job.id == Task.job_id).with_for_update(skip_locked=True, of=(Task, Job))


def _lease(session: Session, wanted: Select[Any], worker: Worker, now: float, lease_until: float) -> Task | None:
    picked = wanted.cte("picked")
    return session.scalars(
        update(Task)
        .where(Task.seq.in_(select(picked.c.seq)), QUEUED)
        .values(
            state=TaskState.running,
            attempt=Task.attempt + 1,
            worker_id=worker.id,
            lease_until=lease_until,
            started_at=func.coalesce(Task.started_at, now),
            progress=None,
        )
        .returning(Task)
        .execution_options(synchronize_session=False)
    ).one_or_none()


def claimed(session: Session, task: Task) -> dict[str, Any]:
    """The fields of the claim of a leased task, which `contract.task.CLAIM` validates."""
    fields: dict[str, Any] = {"task_id": task.id, "attempt": task.attempt, "kind": task.kind}
    if task.kind is not TaskKind.plan:
        fields["request"] = task.payload
    if task.job_id is not None:
        fields |= {"job_id": task.job_id, "spec": job_of(session, task.job_id, lock=False).spec}
    return fields


def write(session: Session, claim: Claim, values: dict[str, Any], *also: ColumnElement[bool]) -> None:
    """Write `values` to the claimed task; LeaseLost unless it still runs at the claim's attempt and `also` is true."""
    mine = (Task.id == claim.task_id, Task.attempt == claim.attempt, RUNNING, *also)
    changed = session.execute(update(Task).where(*mine).values(**values).execution_options(synchronize_session=False))
    if cast("CursorResult[Any]", changed).rowcount == 0:
        STALE_WRITES.inc()
        raise LeaseLost(f"task {claim.task_id} is no longer held at attempt {claim.attempt}")

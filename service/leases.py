"""Leases on tasks: leasing a task to a worker, describing it, and writing to it only while the lease is valid."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Float,
    Select,
    String,
    bindparam,
    func,
    literal_column,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.orm import Session

from service.contract.states import TaskState
from service.contract.task import MOST_LEASE_SECONDS, Claim, TaskKind
from service.counters import STALE_WRITES
from service.enqueue import MET, hardware
from service.errors import LeaseLost, NotFound
from service.models import JOBS, TASKS, Need
from service.stored import completed
from service.tuples import JOB, JobRow, TaskRow, WorkerRow, columns, first

T = TASKS.c
QUEUED = T.state == literal_column("'queued'")
ORDER = (T.rank, T.place, T.seq)
TRIES = 5  # of a claim: on PostgreSQL another worker may take the task that it has just seen
RUNNING = T.state == literal_column("'running'")
# Statements are made once: to make one takes longer than SQLite takes to carry it out.
LOCKED_JOB = JOB.with_for_update()
# Leases, and the pauses after a worker's death, end earlier: a time further ahead was written before the clock was set
# back.
FARTHEST_SECONDS = 2 * MOST_LEASE_SECONDS
NOW: ColumnElement[float] = bindparam("now", type_=Float)
# The condition that a task need not wait any longer after a worker's death.
READY = or_(T.not_before.is_(None), T.not_before <= NOW, T.not_before > NOW + FARTHEST_SECONDS)
# What a worker writes to its task, if it still holds the task at the attempt at which it claimed it.
WRITE = (
    update(TASKS)
    .where(
        T.id == bindparam("task"),
        T.attempt == bindparam("held_attempt"),
        T.job_id.is_not_distinct_from(bindparam("of_job", type_=String)),  # an estimate's task is of no job
        RUNNING,
    )
    .returning(T.base_version)
)
UNSYNCHRONISED = {"synchronize_session": False}


def expired(now: float) -> ColumnElement[bool]:
    """The condition that a running task's lease has run out."""
    return or_(T.lease_until < now, T.lease_until > now + FARTHEST_SECONDS)


def job_of(session: Session, job_id: str, lock: bool = True) -> JobRow:
    """The job's row, with `lock` locked until the transaction ends; NotFound when there is no such job."""
    job = first(session, JobRow, LOCKED_JOB if lock else JOB, {"job": job_id})
    if job is None:
        raise NotFound(f"There is no job {job_id!r}.")
    return job


def has_task(session: Session, job_id: str, *states: ColumnElement[bool]) -> bool:
    """Whether the job has a task in one of these states, such as RUNNING."""
    return session.scalar(select(T.seq).where(T.job_id == job_id, or_(*states)).limit(1)) is not None


def take(
    session: Session, worker: WorkerRow, kinds: tuple[TaskKind, ...], now: float, lease_until: float
) -> TaskRow | None:
    """Lease the next task that the worker's hardware can serve: a job's if there is one, else an estimate."""
    mine = {"now": now, "worker": worker.id, "until": lease_until}
    for _ in range(TRIES):
        found = session.execute(_firsts(kinds), hardware(worker) | {"now": now}).all()
        if not found:
            return None
        for need, kind in found:
            task = first(session, TaskRow, _lease(kind), mine | {"needed": need})
            if task is not None:
                return task
    return None


@cache
def _firsts(kinds: tuple[TaskKind, ...]) -> Any:
    """(need, kind) of the tasks that `heads` finds, the next one first."""
    order = (T.job_id.is_(None), *ORDER)
    return select(T.need, T.kind).where(T.seq.in_(heads(kinds).subquery().select())).order_by(*order)


def heads(kinds: tuple[TaskKind, ...]) -> CompoundSelect[Any]:
    """For each need that the worker meets, and each kind, the number of the first task that waits, or NULL."""
    firsts = (
        select(T.seq).where(QUEUED, T.need == Need.key, T.kind == kind, READY).order_by(*ORDER).limit(1)
        for kind in kinds
    )
    return union_all(*(select(one.correlate(Need).scalar_subquery()).where(*MET) for one in firsts))


def waiting(kind: TaskKind) -> Select[Any]:
    """The next task of a need and a kind, locked; one that another worker claims in this moment is passed over."""
    fitting = select(T.seq).where(QUEUED, T.need == bindparam("needed", type_=String), T.kind == kind, READY)
    wanted = fitting.order_by(*ORDER).limit(1)
    if kind is TaskKind.estimate:
        return wanted.with_for_update(skip_locked=True)
    # The job's row is locked together with the task's. A claim that held only the task's lock and then waited for the
    # job's would deadlock with the end of a task, which locks the job first.
    return wanted.join(JOBS, JOBS.c.id == T.job_id).with_for_update(skip_locked=True, of=(TASKS, JOBS))


@cache
def _lease(kind: TaskKind) -> Any:
    """The statement that leases the task which `waiting` finds to a worker."""
    picked = waiting(kind).cte("picked")
    return (
        update(TASKS)
        .where(T.seq.in_(select(picked.c.seq)), QUEUED)
        .values(
            state=TaskState.running,
            attempt=T.attempt + 1,
            worker_id=bindparam("worker", type_=String),
            lease_until=bindparam("until", type_=Float),
            started_at=func.coalesce(T.started_at, bindparam("now", type_=Float)),
            progress=None,
        )
        .returning(*columns(TASKS, TaskRow))
    )


def claimed(task: TaskRow, job: JobRow | None) -> dict[str, Any]:
    """The fields of the claim of a leased task of that job, which `contract.task.CLAIM` validates."""
    fields: dict[str, Any] = {"task_id": task.id, "attempt": task.attempt, "kind": task.kind}
    if task.kind is not TaskKind.plan:
        fields["request"] = completed(task.payload)
    if job is not None:
        fields |= {"job_id": job.id, "spec": job.spec}
    return fields


def write(session: Session, claim: Claim, values: dict[str, Any], *also: ColumnElement[bool]) -> int:
    """Write `values` to the claimed task, and return the version of the job's history that the task has seen.

    LeaseLost unless it still runs at the claim's attempt and `also` is true.
    """
    mine = {"task": claim.task_id, "held_attempt": claim.attempt, "of_job": getattr(claim, "job_id", None)}
    seen = session.execute(WRITE.where(*also) if also else WRITE, mine | values).scalar_one_or_none()
    if seen is None:
        STALE_WRITES.inc()
        raise LeaseLost(f"task {claim.task_id} is no longer held at attempt {claim.attempt}")
    return int(seen)

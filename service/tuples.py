"""Rows of jobs, tasks and workers as plain values, for the transactions in which tasks are claimed and end.

These are the queue's busiest transactions, and mapping their rows to objects would take most of their time. So they
read tuples, and write with `add`, `change` and the statements of service/leases.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Executable, Select, Table, bindparam, insert, select, update
from sqlalchemy.orm import Session

from service.contract.states import JobPhase, JobStatus
from service.contract.task import TaskKind, Wish
from service.models import JOBS, TASKS, WORKERS


class JobRow(NamedTuple):
    """A job, as far as the queue needs it to begin, go on with, and end the job; see `models.Job`."""

    id: str
    name: str
    spec: dict[str, Any]
    status: JobStatus
    owner: str | None
    created_at: float
    history_version: int = 0
    wish: Wish | None = None
    fingerprint: str | None = None
    facts: dict[str, Any] | None = None
    planned_trials: int | None = None
    notes: list[str] | None = None


class TaskRow(NamedTuple):
    """A task, as far as its claim and its worker's death say of it; see `models.Task`."""

    id: str
    job_id: str | None
    kind: TaskKind
    attempt: int
    deaths: int
    payload: dict[str, Any]
    worker_id: str | None


class WorkerRow(NamedTuple):
    """A worker and its hardware; see `models.Worker`."""

    id: str
    facts: dict[str, Any]
    fingerprint: str
    draining: bool


AnyRow = TypeVar("AnyRow", JobRow, TaskRow, WorkerRow)


def columns(table: Table, row: type[AnyRow]) -> list[Any]:
    """The columns of the table that such a row holds."""
    return [table.c[name] for name in row._fields]


JOB: Select[Any] = select(*columns(JOBS, JobRow)).where(JOBS.c.id == bindparam("job"))
TASK: Select[Any] = select(*columns(TASKS, TaskRow))
WORKER: Select[Any] = select(*columns(WORKERS, WorkerRow)).where(WORKERS.c.id == bindparam("worker"))
INSERT = insert(JOBS)
CHANGE = update(JOBS).where(JOBS.c.id == bindparam("job"))


def first(session: Session, row: type[AnyRow], statement: Executable, values: dict[str, Any]) -> AnyRow | None:
    """The only row that the statement gives with these values, or None."""
    found = session.execute(statement, values).one_or_none()
    return row._make(found) if found is not None else None


def add(session: Session, job: JobRow, phase: JobPhase) -> None:
    """Insert a new job."""
    session.execute(INSERT, job._asdict() | {"phase": phase})


def change(session: Session, job_id: str, **values: Any) -> None:
    """Write these columns of a job."""
    session.execute(CHANGE, {"job": job_id} | values)

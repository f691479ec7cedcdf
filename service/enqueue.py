"""Inserts tasks into the queue's table, and selects those that a worker's hardware can serve."""

from __future__ import annotations

import secrets
from typing import Any

from sqlalchemy import ColumnElement, or_, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.contract.estimate import EstimateRequest
from service.contract.job import HardwareSpec
from service.contract.task import TaskKind, TrialRequest, VerifyRequest
from service.models import Base, Job, Task, Worker

URGENT, ORDINARY = 0, 1  # ranks of tasks: lower ones are claimed first


def new_id() -> str:
    """Sixteen random hex digits, which cannot be guessed."""
    return secrets.token_hex(8)


def insert_if_new(session: Session, table: type[Base], **values: Any) -> None:
    """Insert a row, unless it violates a unique index: then the table has such a row already."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    session.execute(dialect.insert(table).values(**values).on_conflict_do_nothing())


def queue_plan(session: Session, job: Job, now: float) -> None:
    """Queue a plan, unless the job has one that is queued or running; a running plan notices new history itself."""
    _queue(session, TaskKind.plan, now, rank=URGENT, payload={}, **_of_job(job))


def queue_task(session: Session, job: Job, kind: TaskKind, request: TrialRequest | VerifyRequest, now: float) -> None:
    """Queue a trial or a verification, unless the job has it already."""
    if isinstance(request, TrialRequest):
        named: dict[str, Any] = {"key": f"{request.configuration.key}-{request.origin}"[:32], "number": request.number}
    else:
        named = {"key": request.method}
    _queue(session, kind, now, payload=request.model_dump(mode="json"), **named, **_of_job(job))


def queue_estimate(session: Session, request: EstimateRequest, now: float) -> str:
    """Queue an estimate, which any worker can compute; return the task's id."""
    return _queue(session, TaskKind.estimate, now, job_seq=0, payload=request.model_dump(mode="json"))


def _queue(session: Session, kind: TaskKind, now: float, **values: Any) -> str:
    task_id = new_id()
    defaults = {"state": "queued", "rank": ORDINARY, "attempt": 0, "deaths": 0, "number": 0, "base_version": 0}
    insert_if_new(session, Task, **(defaults | {"id": task_id, "kind": kind, "created_at": now} | values))
    return task_id


def _of_job(job: Job) -> dict[str, Any]:
    hardware = HardwareSpec.model_validate(job.spec["hardware"])
    return {
        "job_id": job.id,
        "job_seq": job.seq,
        "need_device": None if hardware.device == "auto" else hardware.device,
        "need_name": hardware.name.lower() if hardware.name else None,
        "need_bytes": hardware.memory_gib * 2**30 if hardware.memory_gib else None,
        "fingerprint": job.fingerprint,
    }


def servable(worker: Worker) -> tuple[ColumnElement[bool], ...]:
    """The SQL conditions on the tasks that a worker's hardware can serve."""
    facts = worker.facts
    return (
        or_(Task.need_device.is_(None), Task.need_device == facts["device"]),
        or_(Task.need_name.is_(None), text("lower(:name) LIKE '%' || need_name || '%'").bindparams(name=facts["name"])),
        or_(Task.need_bytes.is_(None), Task.need_bytes <= facts["memory_bytes"]),
        or_(Task.fingerprint.is_(None), Task.fingerprint == worker.fingerprint),
    )

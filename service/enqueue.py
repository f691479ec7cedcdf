"""Rows of the task table: how plans, trials and verifications are queued, and which worker may take them."""

from __future__ import annotations

import secrets
from typing import Any

from sqlalchemy import ColumnElement, insert, or_, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from service.contract.job import JobSpec
from service.contract.task import TaskKind, TrialRequest, VerifyRequest
from service.models import Job, Task, Worker


def new_id() -> str:
    """Sixteen hex digits nobody can guess."""
    return secrets.token_hex(8)


def queue_plan(session: Session, job: Job, now: float) -> None:
    """Queue a plan unless one is waiting or under way; a running one notices the new history itself."""
    _insert(session, _row(job, TaskKind.plan, now) | {"rank": 0, "payload": {}})


def queue_task(session: Session, job: Job, kind: TaskKind, request: TrialRequest | VerifyRequest, now: float) -> None:
    """Queue a trial or a verification; one that the job has already is left alone."""
    if isinstance(request, TrialRequest):
        values = {"key": f"{request.configuration.key}-{request.origin}"[:32], "number": request.number}
    else:
        values = {"key": request.method, "number": 0}
    _insert(session, _row(job, kind, now) | values | {"payload": request.model_dump(mode="json")})


def _insert(session: Session, values: dict[str, Any]) -> None:
    """Insert unless a unique index says that it is there already: somebody else was as quick."""
    try:
        with session.begin_nested():
            session.execute(insert(Task).values(id=new_id(), **values))
    except IntegrityError:
        return


def _row(job: Job, kind: TaskKind, now: float) -> dict[str, Any]:
    hardware = JobSpec.model_validate(job.spec).hardware
    return {
        "job_id": job.id,
        "job_seq": job.seq,
        "kind": kind.value,
        "state": "queued",
        "rank": 1,
        "attempt": 0,
        "deaths": 0,
        "number": 0,
        "base_version": 0,
        "created_at": now,
        "need_device": None if hardware.device == "auto" else hardware.device,
        "need_name": hardware.name.lower() if hardware.name else None,
        "need_bytes": hardware.memory_gib * 2**30 if hardware.memory_gib else None,
        "fingerprint": job.fingerprint,
    }


def servable(worker: Worker) -> tuple[ColumnElement[bool], ...]:
    """The tasks that a worker's hardware can serve."""
    facts = worker.facts
    return (
        or_(Task.need_device.is_(None), Task.need_device == facts["device"]),
        or_(Task.need_name.is_(None), text("lower(:name) LIKE '%' || need_name || '%'").bindparams(name=facts["name"])),
        or_(Task.need_bytes.is_(None), Task.need_bytes <= facts["memory_bytes"]),
        or_(Task.fingerprint.is_(None), Task.fingerprint == worker.fingerprint),
    )

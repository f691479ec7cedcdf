"""Inserts tasks and what they need into the queue's tables, and selects the needs that a worker's hardware meets."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Float, String, bindparam, or_, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.contract.estimate import EstimateRequest
from service.contract.job import HardwareSpec
from service.contract.task import TaskKind, TrialRequest, VerifyRequest
from service.models import Base, Need, Task
from service.tuples import JobRow, WorkerRow

URGENT, ORDINARY = 0, 1  # ranks of tasks: lower ones are claimed first
PRIORITY_SECONDS = 3600.0  # of waiting that one step of priority is worth


def new_id() -> str:
    """Sixteen random hex digits, which cannot be guessed."""
    return secrets.token_hex(8)


def insert_if_new(session: Session, table: type[Base], **values: Any) -> bool:
    """Insert a row, unless it violates a unique index: then the table has such a row already. Whether it was inserted.

    On PostgreSQL it waits for another transaction that has inserted such a row and may still be rolled back.
    """
    done: Any = session.execute(_insert_if_new(table, session.get_bind().dialect.name), values)
    return bool(done.rowcount)


@cache
def _insert_if_new(table: type[Base], dialect: str) -> Any:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(table.__table__).on_conflict_do_nothing().execution_options(preserve_rowcount=True)  # type: ignore[arg-type]


def queue_plan(session: Session, job: JobRow, now: float) -> None:
    """Queue a plan, unless the job has one that is queued or running; a running plan notices new history itself."""
    seen = {"base_version": job.history_version}
    _queue(session, TaskKind.plan, now, rank=URGENT, payload={}, **seen, **_of_job(session, job))


def queue_task(
    session: Session, job: JobRow, kind: TaskKind, request: TrialRequest | VerifyRequest, now: float
) -> bool:
    """Queue a trial or a verification, unless the job has it already. Whether it was queued."""
    if isinstance(request, TrialRequest):
        named: dict[str, Any] = {"key": f"{request.configuration.key}-{request.origin}"[:32], "number": request.number}
    else:
        named = {"key": request.method}
    payload = request.model_dump(mode="json")
    return _queue(session, kind, now, payload=payload, **named, **_of_job(session, job)) is not None


def queue_estimate(session: Session, request: EstimateRequest, now: float, owner: str | None) -> str:
    """Queue an estimate, which any worker can compute; return the task's id."""
    need, payload = need_of(session, HardwareSpec(), None), request.model_dump(mode="json")
    task_id = _queue(session, TaskKind.estimate, now, place=now, need=need, owner=owner, payload=payload)
    assert task_id is not None, "estimates have no key that another one may have"
    return task_id


def _queue(session: Session, kind: TaskKind, now: float, **values: Any) -> str | None:
    """The new task's id; None where there is such a task already."""
    task_id = new_id()
    defaults = {"state": "queued", "rank": ORDINARY, "attempt": 0, "deaths": 0, "number": 0, "base_version": 0}
    new = insert_if_new(session, Task, **(defaults | {"id": task_id, "kind": kind, "created_at": now} | values))
    return task_id if new else None


def _of_job(session: Session, job: JobRow) -> dict[str, Any]:
    need = need_of(session, HardwareSpec.model_validate(job.spec["hardware"]), job.fingerprint)
    return {"job_id": job.id, "place": place(job), "need": need}


def place(job: JobRow) -> float:
    """The job's place in the queue, as a time: lower ones are served first.

    A step of priority counts as an hour of waiting. So a job of high priority passes those of low priority that were
    submitted in the hours before it, and none of them waits for ever: whoever waits long enough comes first.
    """
    return job.created_at - PRIORITY_SECONDS * int(job.spec.get("priority", 0))


def need_of(session: Session, hardware: HardwareSpec, fingerprint: str | None) -> str:
    """The key of the row that says which hardware is needed; the row is inserted where it is missing.

    With a fingerprint, only hardware of that fingerprint will do: a job that has begun stays on its hardware.
    """
    values = {
        "device": None if hardware.device == "auto" else hardware.device,
        "name": re.sub(r"([\\%_])", r"\\\1", hardware.name.lower()) if hardware.name else None,
        "bytes": hardware.memory_gib * 2**30 if hardware.memory_gib else None,
        "fingerprint": fingerprint,
    }
    key = hashlib.sha256(json.dumps(list(values.values())).encode()).hexdigest()[:16]
    insert_if_new(session, Need, key=key, **values)
    return key


NAMED = text(r"lower(:device_name) LIKE '%' || needs.name || '%' ESCAPE '\'").bindparams(
    bindparam("device_name", type_=String)
)
# The SQL conditions on the needs that a worker's hardware meets, which `hardware` says.
MET: tuple[ColumnElement[bool], ...] = (
    or_(Need.device.is_(None), Need.device == bindparam("device", type_=String)),
    or_(Need.name.is_(None), NAMED),
    or_(Need.bytes.is_(None), Need.bytes <= bindparam("memory_bytes", type_=Float)),
    or_(Need.fingerprint.is_(None), Need.fingerprint == bindparam("fingerprint", type_=String)),
)


def hardware(worker: WorkerRow) -> dict[str, Any]:
    """The parameters of MET."""
    facts = worker.facts
    named = {"device": facts["device"], "device_name": facts["name"], "memory_bytes": float(facts["memory_bytes"])}
    return named | {"fingerprint": worker.fingerprint}

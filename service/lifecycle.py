"""How a job's row changes when the job begins and when it ends."""

from __future__ import annotations

from typing import Any

from sqlalchemy import String, bindparam, update
from sqlalchemy.orm import Session

from service import events, messages
from service.contract.job import HardwareSpec
from service.contract.states import JobPhase, JobStatus, TaskState
from service.contract.task import Wish
from service.enqueue import need_of
from service.errors import OTHER_VERSION, NotYet
from service.leases import QUEUED, RUNNING
from service.models import TASKS
from service.tuples import JobRow, TaskRow, WorkerRow, change

OF_JOB = update(TASKS).where(TASKS.c.job_id == bindparam("job"))
NEEDS = OF_JOB.values(need=bindparam("needed", type_=String))
CANCEL = OF_JOB.where(QUEUED).values(state=TaskState.cancelled)


def start(session: Session, job: JobRow, worker: WorkerRow, now: float) -> None:
    """Bind a queued job to the hardware of the worker that claims first: timings of two machines never mix."""
    if job.status is not JobStatus.queued:
        return
    here = {"fingerprint": worker.fingerprint, "facts": worker.facts}
    change(session, job.id, status=JobStatus.running, phase=JobPhase.baseline, started_at=now, **here)
    need = need_of(session, HardwareSpec.model_validate(job.spec["hardware"]), worker.fingerprint)
    session.execute(NEEDS, {"job": job.id, "needed": need})
    events.append(session, job.id, "started", now, worker=worker.id, device=worker.facts["name"])


def end(
    session: Session,
    job: JobRow,
    status: JobStatus,
    now: float,
    error: str | None = None,
    wish: Wish | None = None,
    **told: Any,
) -> None:
    """End a job, and cancel its tasks that nobody has begun; `told` are other columns, as its last recommendation."""
    ended = {"status": status, "phase": JobPhase.done, "finished_at": now, "error": error, "wish": wish}
    change(session, job.id, **ended, **told)
    session.execute(CANCEL, {"job": job.id})
    events.append(session, job.id, status, now, error=error)
    messages.announce(session, job, status, error, now)


def end_unreadable(session: Session, task: TaskRow, job: JobRow | None, now: float) -> None:
    """End a leased task that this version cannot read, and its job, or it would keep all others waiting."""
    ended = {"state": TaskState.cancelled, "finished_at": now, "lease_until": None, "worker_id": None}
    of_estimate = {"error": OTHER_VERSION} if job is None else {}
    session.execute(update(TASKS).where(TASKS.c.id == task.id, RUNNING).values(**ended, **of_estimate))
    if job is not None and not job.status.ended:
        end(session, job, JobStatus.failed, now, error=OTHER_VERSION)


def must_be_open(job: JobRow) -> None:
    """NotYet when the job has ended."""
    if job.status.ended:
        raise NotYet(f"Job {job.id} has already ended as {job.status}.")

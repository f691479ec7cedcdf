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
from service.errors import NotYet
from service.leases import QUEUED, UNSYNCHRONISED
from service.models import Job, Task, Worker

OF_JOB = update(Task).where(Task.job_id == bindparam("job")).execution_options(**UNSYNCHRONISED)
NEEDS = OF_JOB.values(need=bindparam("needed", type_=String))
CANCEL = OF_JOB.where(QUEUED).values(state=TaskState.cancelled)


def start(session: Session, job: Job, worker: Worker, now: float) -> None:
    """Bind a queued job to the hardware of the worker that claims first: timings of two machines never mix."""
    if job.status is not JobStatus.queued:
        return
    job.status, job.phase, job.started_at = JobStatus.running, JobPhase.baseline, now
    job.fingerprint, job.facts = worker.fingerprint, worker.facts
    need = need_of(session, HardwareSpec.model_validate(job.spec["hardware"]), worker.fingerprint)
    session.execute(NEEDS, {"job": job.id, "needed": need})
    events.append(session, job.id, "started", now, worker=worker.id, device=worker.facts["name"])


def end(
    session: Session,
    job: Job,
    status: JobStatus,
    now: float,
    error: str | None = None,
    recommendation: dict[str, Any] | None = None,
    wish: Wish | None = None,
) -> None:
    """End a job with its last recommendation, and cancel its tasks that nobody has begun."""
    job.status, job.phase, job.finished_at, job.error = status, JobPhase.done, now, error
    job.recommendation, job.wish = recommendation, wish
    session.execute(CANCEL, {"job": job.id})
    events.append(session, job.id, status, now, error=error)
    messages.announce(session, job, now)


def must_be_open(job: Job) -> None:
    """NotYet when the job has ended."""
    if job.status.ended:
        raise NotYet(f"Job {job.id} has already ended as {job.status}.")

"""How a job's row changes when the job begins and when it ends."""

from __future__ import annotations

from typing import Any

from sqlalchemy import String, bindparam, delete, select, update
from sqlalchemy.orm import Session

from service import events, history, messages
from service.contract.job import HardwareSpec
from service.contract.states import JobPhase, JobStatus, TaskState
from service.contract.task import TaskKind, Wish
from service.enqueue import need_of, queue_plan
from service.errors import OTHER_VERSION, NotYet
from service.leases import QUEUED, RUNNING, T, has_task
from service.models import JOBS, TASKS, WORKERS
from service.tuples import JobRow, TaskRow, WorkerRow, change, columns

OF_JOB = update(TASKS).where(TASKS.c.job_id == bindparam("job"))
NEEDS = OF_JOB.values(need=bindparam("needed", type_=String))
CANCEL = OF_JOB.where(QUEUED).values(state=TaskState.cancelled)
# Tasks that are only cancelled could not be queued again: a job has one of each configuration.
DISCARD = delete(TASKS).where(T.job_id == bindparam("job"), QUEUED, T.kind != TaskKind.plan, T.deaths == 0)


def start(session: Session, job: JobRow, worker: WorkerRow, now: float) -> None:
    """Bind a job to the hardware of the worker that claims first: timings of two machines never mix."""
    if job.fingerprint is not None or job.status.ended:
        return
    begun = {} if job.status is JobStatus.running else {"status": JobStatus.running, "started_at": now}
    _bind(session, job, worker.fingerprint, worker.facts, phase=JobPhase.baseline, **begun)
    events.append(session, job.id, "started", now, worker=worker.id, device=worker.facts["name"])


def unbind(session: Session, now: float) -> None:
    """Release jobs from hardware that has no living worker any more, if nothing of them is measured yet.

    Other hardware may then take them, and they are planned anew. A trial that has ended its worker is kept, with the
    number of its deaths: it may do so again, and one that ends three workers is given up.
    """
    alive = select(WORKERS.c.id).where(WORKERS.c.fingerprint == JOBS.c.fingerprint, history.alive(now))
    unmeasured = (JOBS.c.status == JobStatus.running, JOBS.c.fingerprint.is_not(None), JOBS.c.history_version == 0)
    stranded = select(*columns(JOBS, JobRow)).where(*unmeasured, ~alive.exists()).order_by(JOBS.c.seq)
    for row in session.execute(stranded.with_for_update(of=JOBS, skip_locked=True)).all():
        job = JobRow._make(row)
        if has_task(session, job.id, RUNNING):  # asked now that the job's row is locked, so that nobody claims another
            continue
        session.execute(DISCARD, {"job": job.id})
        _bind(session, job, None, None, notes=None, planned_trials=None)
        queue_plan(session, job._replace(fingerprint=None), now)
        events.append(session, job.id, "unbound", now, reason="no worker of its hardware is left")


def _bind(session: Session, job: JobRow, fingerprint: str | None, facts: dict[str, Any] | None, **told: Any) -> None:
    """Have hardware of that fingerprint serve a job's tasks, or any that its spec allows; `told` are other columns."""
    change(session, job.id, fingerprint=fingerprint, facts=facts, **told)
    need = need_of(session, HardwareSpec.model_validate(job.spec["hardware"]), fingerprint)
    session.execute(NEEDS, {"job": job.id, "needed": need})


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

"""The writes that users ask for: submitting, ending and deleting jobs and estimates, and draining workers."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.orm import Session

from service import conclude, estimates, events, lifecycle, uploads
from service.access import ANYBODY, Caller
from service.contract.estimate import EstimateRequest
from service.contract.job import JobSpec
from service.contract.paths import UPLOAD
from service.contract.states import EstimateStatus, JobPhase, JobStatus, TaskState
from service.contract.task import TaskKind, Wish
from service.db import reading
from service.enqueue import insert_if_new, new_id, queue_estimate, queue_plan
from service.errors import KeyReused, NotFound, NotYet, TooMany
from service.leases import QUEUED, RUNNING, UNSYNCHRONISED, job_of
from service.models import ApiKey, Delivery, Job, JobLabel, Need, Submission, Task, Worker
from service.text import counted
from service.transactions import Transactions
from service.tuples import JobRow, add

REMEMBERED_SECONDS = 24 * 3600.0  # for which a submission under an Idempotency-Key can be repeated
ESTIMATES_SECONDS = 7 * 24 * 3600.0  # for which estimates are kept
MESSAGES_SECONDS = 7 * 24 * 3600.0  # for which messages to webhooks are kept that were delivered or given up
UNTAKEN_SECONDS = 24 * 3600.0  # for which an estimate waits for a worker
DELETING_SECONDS, RESTING_SECONDS = 3.0, 0.05  # of deleting old jobs at a time, and between two transactions
OPEN = (JobStatus.queued, JobStatus.running)
UNDER_WAY = (TaskState.queued, TaskState.running)


class _UsedMeanwhile(Exception):
    """An idempotency key was used by another submission at the same moment; its transaction has been committed."""


class Requests(Transactions):
    """The writes that users ask for. Whether a caller may see a job is checked before, by whoever calls."""

    def submit(self, spec: JobSpec, caller: Caller = ANYBODY, idempotency_key: str | None = None) -> str:
        """Queue a job; its id.

        With an idempotency key, the same submission again within a day gives the first one's job; KeyReused when the
        key came with another job before. TooMany when the caller has as many open jobs as its API key allows.
        """
        try:
            return self._submit(spec, caller, idempotency_key)
        except _UsedMeanwhile:
            return self._submit(spec, caller, idempotency_key)

    def repeated(self, spec: JobSpec, caller: Caller, idempotency_key: str | None) -> str | None:
        """The job that the same submission under the key has made, or None; KeyReused when it made another."""
        if idempotency_key is None:
            return None
        with reading(self.engine) as session:
            before = session.get(Submission, (caller.owner or "", idempotency_key))
            return _repeated(before, _digest(spec.model_dump(mode="json"))) if before is not None else None

    def _submit(self, spec: JobSpec, caller: Caller, idempotency_key: str | None) -> str:
        stored, job_id = spec.model_dump(mode="json"), new_id()
        digest = _digest(stored)
        with self.writing() as (session, now):
            if idempotency_key is not None:
                before = session.get(Submission, (caller.owner or "", idempotency_key))
                if before is not None:
                    return _repeated(before, digest)
            _must_have_room(session, caller)
            job = JobRow(job_id, spec.name, stored, JobStatus.queued, owner=caller.owner, created_at=now)
            add(session, job, JobPhase.queued)
            session.add_all(JobLabel(job_id=job_id, key=key, value=value) for key, value in spec.labels.items())
            queue_plan(session, job, now)
            events.append(session, job_id, "submitted", now, name=spec.name)
            if idempotency_key is not None:
                values = {"owner": caller.owner or "", "key": idempotency_key, "digest": digest}
                if not insert_if_new(session, Submission, **values, job_id=job_id, created_at=now):
                    raise _UsedMeanwhile
        return job_id

    def cancel(self, job_id: str) -> None:
        """End a job now and keep nothing running; NotFound, or NotYet when it has ended otherwise."""

        def write(session: Session, now: float, job: JobRow, last: dict[str, Any]) -> None:
            if job.status is not JobStatus.cancelled:
                lifecycle.must_be_open(job)
                lifecycle.end(session, job, JobStatus.cancelled, now, wish=Wish.cancel, **last)

        self.conclude(job_id, conclude.last_recommendation_column, write)

    def stop(self, job_id: str) -> str:
        """End a job now with the best so far; its status. NotFound, or NotYet when it has ended already."""

        def write(session: Session, now: float, job: JobRow, last: dict[str, Any]) -> JobStatus:
            lifecycle.must_be_open(job)
            status, error = JobStatus.succeeded, None
            if last.get("recommendation") is None:
                status, error = JobStatus.failed, conclude.STOPPED_TOO_EARLY if last else conclude.STOPPED_AT_A_DEFECT
            lifecycle.end(session, job, status, now, error=error, wish=Wish.stop, **last)
            return status

        return self.conclude(
            job_id, lambda known: conclude.last_recommendation_column(known.with_notes((conclude.STOPPED,))), write
        )

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with its trials and events; NotFound, or NotYet while it is open."""
        with self.writing() as (session, _):
            job = job_of(session, job_id)
            if not job.status.ended:
                raise NotYet(f"Job {job_id} is {job.status}; cancel it before it is deleted.")
            session.execute(delete(Job).where(Job.id == job_id))

    def prune(self, keep_seconds: float | None) -> int:
        """Delete what is no longer needed, and jobs that ended longer ago than that (None keeps all); how many jobs."""
        with self.writing() as (session, now):
            session.execute(delete(Submission).where(Submission.created_at < now - REMEMBERED_SECONDS))
            answered = (Task.job_id.is_(None), Task.state.in_((TaskState.done, TaskState.cancelled)))
            session.execute(delete(Task).where(*answered, Task.created_at < now - ESTIMATES_SECONDS))
            untaken = (Task.job_id.is_(None), Task.state == TaskState.queued)
            session.execute(delete(Task).where(*untaken, Task.created_at < now - UNTAKEN_SECONDS))
            told = (Delivery.due_at.is_(None), Delivery.created_at < now - MESSAGES_SECONDS)
            session.execute(delete(Delivery).where(*told))
        self._forget_needs()
        if keep_seconds is None:
            return 0
        gone, until = 0, time.monotonic() + DELETING_SECONDS
        while (some := self._delete_old_jobs(keep_seconds)) and time.monotonic() < until:
            gone += some
            time.sleep(RESTING_SECONDS)  # in which others write
        return gone + some

    def prune_uploads(self, folder: Path) -> int:
        """Delete data that was sent more than a day ago and that no job names, and what is left of broken uploads."""

        def named() -> set[str]:
            source = Job.spec["dataset"]["source"].as_string()
            with reading(self.engine) as session:
                found = session.scalars(select(source).where(source.startswith(UPLOAD)).distinct()).all()
            return {name.removeprefix(UPLOAD) for name in found}

        owner = self.engine.url.render_as_string(hide_password=True)
        return uploads.prune(folder, owner, time.time() - uploads.KEPT_SECONDS, named)

    def _delete_old_jobs(self, keep_seconds: float) -> int:
        """Delete some of the jobs that ended longer ago than that, the oldest first; how many."""
        with self.writing() as (session, now):
            old = select(Job.id).where(Job.finished_at < now - keep_seconds).order_by(Job.finished_at).limit(100)
            gone = session.scalars(old).all()
            session.execute(delete(Job).where(Job.id.in_(gone)))
            return len(gone)

    def _forget_needs(self) -> None:
        """Delete the needs that no open task has, as every claim looks at each need."""
        with self.writing() as (session, _):
            if self.engine.dialect.name == "postgresql":
                # Waits for transactions that may queue a task of a need that is there already, and keeps others out.
                session.execute(text("LOCK TABLE needs IN SHARE ROW EXCLUSIVE MODE"))
            used = (select(Task.seq).where(Task.need == Need.key, state).exists() for state in (QUEUED, RUNNING))
            session.execute(delete(Need).where(*(~one for one in used)).execution_options(**UNSYNCHRONISED))

    def drain(self, worker_id: str) -> None:
        """Have a worker take no further task, and end once its present one has ended; NotFound."""
        with self.writing() as (session, _):
            named = update(Worker).where(Worker.id == worker_id).values(draining=True)
            changed: Any = session.execute(named)
            if changed.rowcount == 0:
                raise NotFound(f"There is no worker {worker_id!r}; `dynotune workers` lists them.")

    def submit_estimate(self, request: EstimateRequest, caller: Caller = ANYBODY) -> str:
        """Queue an estimate; its id. TooMany where the caller has as many open jobs and estimates as it may have."""
        with self.writing() as (session, now):
            _must_have_room(session, caller)
            return queue_estimate(session, request, now, caller.owner)

    def cancel_estimate(self, estimate_id: str, caller: Caller = ANYBODY) -> EstimateStatus:
        """End an estimate that nobody waits for any more: its worker finds the lease lost. Its state; NotFound."""
        with self.writing() as (session, _):
            named = (Task.id == estimate_id, Task.kind == TaskKind.estimate)
            row = session.scalars(select(Task).where(*named).with_for_update()).one_or_none()
            if row is None or caller.sees not in (None, row.owner):
                raise NotFound(f"There is no estimate {estimate_id!r}.")
            if row.state is not TaskState.done:
                row.state, row.lease_until = TaskState.cancelled, None
            return estimates.state_of(row)


def _digest(spec: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()


def _repeated(before: Submission, digest: str) -> str:
    if before.digest != digest:
        raise KeyReused(
            f"The Idempotency-Key {before.key!r} was used for another job ({before.job_id}); take a new key for each "
            "job, and the same only to send the same job again."
        )
    return before.job_id


def _must_have_room(session: Session, caller: Caller) -> None:
    if caller.most_open_jobs is None:
        return
    # The owner's keys are locked, so that submissions at the same moment are counted one after the other.
    session.scalars(select(ApiKey.id).where(ApiKey.owner == caller.owner).order_by(ApiKey.id).with_for_update()).all()
    jobs = select(func.count()).select_from(Job).where(Job.owner == caller.owner, Job.status.in_(OPEN))
    asked = select(func.count()).select_from(Task).where(Task.owner == caller.owner, Task.state.in_(UNDER_WAY))
    count = (session.scalar(jobs) or 0) + (session.scalar(asked) or 0)
    if count >= caller.most_open_jobs:
        has = counted(count, "open job or estimate", "open jobs and estimates")
        raise TooMany(
            f"You have {has}, and your API key allows {caller.most_open_jobs}; wait for one to end, or cancel one."
        )

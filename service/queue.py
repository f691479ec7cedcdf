"""The queue in SQL, the only writer of state: leases, heartbeat, attempt fence, reaper. One code for both databases.

Every write is one short transaction that computes nothing. What has to be computed, such as a recommendation, is
computed between a read and the write, and the write is refused and repeated when the job's history has grown since the
read. A claim looks at needs, not at tasks: for each need that the worker's hardware meets, a partial index on the
literal state 'queued' gives the first task. Its row is locked with SKIP LOCKED on PostgreSQL, by there being one writer
on SQLite. Time is the database's on PostgreSQL and an injected clock's on SQLite.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import ColumnElement, bindparam, delete, select, update
from sqlalchemy.orm import Session

from service import conclude, estimates, events, history, leases, lifecycle, logs
from service.conclude import MOST_DEATHS_OF_A_TASK, Inconclusive, Stored, Unreadable
from service.contract.estimate import Estimate
from service.contract.hardware import HardwareFacts
from service.contract.measurement import Measurement, Outcome, Verification
from service.contract.states import JobStatus, TaskState, WorkerState
from service.contract.task import (
    CLAIM,
    MOST_LOG,
    Claim,
    EstimateClaim,
    JobClaim,
    PlanClaim,
    PlanDecision,
    PlanInput,
    TaskKind,
    TrialClaim,
    VerifyClaim,
    Wish,
)
from service.db import check_revision, reading
from service.enqueue import insert_if_new, queue_plan, queue_task
from service.errors import OTHER_VERSION, Drained, LeaseLost, NotFound, NotOurs
from service.history import JobHistory
from service.leases import RUNNING, job_of
from service.models import TASKS, WORKERS, Task, Worker
from service.requests import Requests
from service.text import first_line, storable
from service.transactions import Made, Written
from service.tuples import JOB, TASK, WORKER, JobRow, TaskRow, WorkerRow, change, first

NOTHING_NEW = "What was planned had been measured already, which is a defect of dynotune; please report it."
FORGOTTEN_SECONDS = 24 * 3600.0
log = logs.logger("dynotune.queue")
# A sign of life of a worker that is named, and of the one that runs a task.
SEEN = update(WORKERS).where(WORKERS.c.id == bindparam("worker"))
BUSY_SEEN = update(WORKERS).where(
    WORKERS.c.id == select(TASKS.c.worker_id).where(TASKS.c.id == bindparam("task")).scalar_subquery()
)


class Queue(Requests):
    """The broker's SQL form, and the writes of the control plane."""

    def register(self, worker_id: str, pid: int, facts: HardwareFacts) -> None:
        """Announce a worker, if it is not known. OtherVersion where the tables are of another version."""
        device = {"facts": facts.model_dump(mode="json"), "fingerprint": facts.fingerprint}
        with self.writing() as (session, now):
            check_revision(session)
            state = {"state": WorkerState.idle, "draining": False, "started_at": now, "seen_at": now}
            insert_if_new(session, Worker, id=worker_id, pid=pid, **device, **state)

    def leave(self, worker_id: str) -> None:
        """Forget a worker that has ended in order."""
        with self.writing() as (session, _):
            session.execute(delete(Worker).where(Worker.id == worker_id))

    def claim(self, worker_id: str, kinds: tuple[TaskKind, ...]) -> Claim | None:
        """Lease the next task the worker's hardware can serve: plans first, then the first job's, then estimates."""
        with self.writing() as (session, now):
            worker = first(session, WorkerRow, WORKER, {"worker": worker_id})
            if worker is None:
                return None
            if worker.draining:
                raise Drained(f"Worker {worker_id} was told to end.")
            task = leases.take(session, worker, kinds, now, now + self._lease)
            job = job_of(session, task.job_id) if task and task.job_id is not None else None
            claim = _readable(leases.claimed(task, job)) if task else None
            doing = {"state": WorkerState.busy if claim else WorkerState.idle, "task_id": claim and claim.task_id}
            session.execute(SEEN, {"worker": worker_id, "seen_at": now} | doing)
            if task is not None and claim is None:
                if self._is_of_a_worker:
                    raise _not_ours(task.job_id)
                lifecycle.end_unreadable(session, task, job, now)
            if claim is None:
                return None
            if job is not None:
                lifecycle.start(session, job, worker, now)
        if claim.kind is not TaskKind.estimate:
            return claim
        with reading(self.engine) as session:
            lines = estimates.known(session, claim.request.spec, worker_id)
        return claim.model_copy(update={"known": lines})

    def unheard(self, worker_id: str) -> None:
        """Hand on the task that a worker was given in an answer that was lost; the worker holds no other task."""
        with self.writing() as (session, _):
            for task in session.scalars(select(Task).where(RUNNING, Task.worker_id == worker_id).with_for_update()):
                over = task.job_id is not None and job_of(session, task.job_id, lock=False).status.ended
                task.state = TaskState.cancelled if over else TaskState.queued
                task.worker_id = task.lease_until = task.started_at = None

    def renew(self, claim: Claim, progress: str | None = None, log: str | None = None) -> Wish | None:
        """Extend the lease and ask what the user wishes; LeaseLost when it is no longer held."""
        with self.writing() as (session, now):
            values: dict[str, Any] = {"lease_until": now + self._lease}
            if progress is not None:
                values["progress"] = progress[:200]
            if log is not None:
                values["log"] = _kept(log)
            leases.write(session, claim, values)
            session.execute(BUSY_SEEN, {"task": claim.task_id, "seen_at": now})
            if claim.kind is TaskKind.estimate:
                return None
            job = _job(session, claim, lock=False)
            return job.wish or Wish.cancel if job.status.ended else None

    def plan_input(self, claim: PlanClaim) -> PlanInput:
        """What the claimed plan may know. Notes the history's version before reading it, so that no trial is missed."""
        with self.writing() as (session, now):
            job = _job(session, claim)
            leases.write(session, claim, {"base_version": job.history_version})
        with history.if_readable(claim.job_id), reading(self.engine) as session:
            return history.plan_input(session, claim.job_id, now)
        if self._is_of_a_worker:
            raise _not_ours(claim.job_id)
        self._fail_job(claim, OTHER_VERSION, {})
        raise LeaseLost(OTHER_VERSION)

    def finish_plan(self, claim: PlanClaim, decision: PlanDecision) -> None:
        """Carry out a decision; one made on an older history queues another plan instead of ending the job."""

        def conclusion(known: JobHistory) -> tuple[Stored, str | None, list[str]]:
            known = known.with_notes(decision.notes)
            best = conclude.best(known, decision.finish)
            nothing = conclude.nothing_stable(known) if best is None and decision.finish else None
            return best, decision.error or nothing, list(known.notes)

        def write(session: Session, now: float, job: JobRow, made: tuple[Stored, str | None, list[str]]) -> None:
            best, error, notes = made
            seen = leases.write(session, claim, {"state": TaskState.done, "finished_at": now, "lease_until": None})
            if job.status is not JobStatus.running:
                return
            stale = seen != job.history_version
            queued = [queue_task(session, job, TaskKind.trial, request, now) for request in decision.trials]
            if decision.verify and not stale:
                queued.append(queue_task(session, job, TaskKind.verify, decision.verify, now))
            told: dict[str, Any] = {"notes": notes, "planned_trials": decision.planned_trials or job.planned_trials}
            if stale:
                change(session, job.id, phase=decision.phase, **told)
                queue_plan(session, job, now)
            elif decision.finish:
                status = JobStatus.failed if error else JobStatus.succeeded
                lifecycle.end(session, job, status, now, error=error, recommendation=best, **told)
            elif any(queued) or leases.has_task(session, job.id, leases.QUEUED, RUNNING):
                change(session, job.id, phase=decision.phase, recommendation=best, **told)
            else:
                lifecycle.end(session, job, JobStatus.failed, now, error=NOTHING_NEW, recommendation=best, **told)

        self._conclude_or_fail(claim, conclusion, write, {})

    def finish_trial(self, claim: TrialClaim, measurement: Measurement, log: str) -> None:
        """Record a trial, and the best so far with it."""
        self._end_trial(claim, measurement, {"log": _kept(log)})

    def finish_verify(self, claim: VerifyClaim, verification: Verification, log: str) -> None:
        """Record a verification, and the best so far with it."""
        values = {"result": verification.model_dump(mode="json"), "outcome": Outcome.ok, "log": _kept(log)}
        self._end_verify(claim, verification, values, verification.note)

    def finish_estimate(self, claim: EstimateClaim, estimate: Estimate) -> None:
        """Record an estimate."""
        self._end_estimate(claim, {"result": estimate.model_dump(mode="json"), "outcome": Outcome.ok})

    def release(self, claim: Claim) -> None:
        """Hand a task back unfinished; when its job has ended, close it instead."""
        with self.writing() as (session, _):
            over = claim.kind is not TaskKind.estimate and _job(session, claim).status.ended
            state = TaskState.cancelled if over else TaskState.queued
            # Begun anew, or the time it waits would count as time used.
            values = {"state": state, "worker_id": None, "lease_until": None, "started_at": None}
            leases.write(session, claim, values)

    def fail(self, claim: Claim, reason: str, log: str = "") -> None:
        """End the task and its job with a sentence; what was learnt before stays recommended."""
        reason, log = storable(reason), _kept(log)
        if claim.kind is TaskKind.estimate:
            self._end_estimate(claim, {"error": reason, "log": log})
        else:
            self._fail_job(claim, reason, {"log": log})

    def fetch(self, source: str, folder: Path) -> None:
        """Do nothing: a worker with access to the database finds uploads in the DYNOTUNE_HOME that it shares."""

    def reap(self) -> int:
        """Requeue tasks whose leases ran out, or give them up after three deaths; free jobs whose hardware is gone."""
        with self.writing() as (session, now):
            session.execute(delete(Worker).where(Worker.seen_at < now - FORGOTTEN_SECONDS))
            lifecycle.unbind(session, now)
            expired = leases.expired(now)
            tasks = [TaskRow._make(row) for row in session.execute(TASK.where(RUNNING, expired))]
            # An estimate has no job, nor has a task whose job is deleted in this moment.
            jobs = [first(session, JobRow, JOB, {"job": task.job_id}) for task in tasks]
            dead = [_readable(leases.claimed(task, job)) for task, job in zip(tasks, jobs, strict=True)]
            for task, job, claim in zip(tasks, jobs, dead, strict=True):
                if claim is None and not self._is_of_a_worker:
                    lifecycle.end_unreadable(session, task, job, now)
        return sum(self._bury(claim, task, expired) for claim, task in zip(dead, tasks, strict=True) if claim)

    def ask(self) -> None:
        """Ask the database for the time; raises where it does not answer."""
        with reading(self.engine) as session:
            self.now(session)

    # --- inside ---------------------------------------------------------------------------------------------

    def _bury(self, claim: Claim, task: TaskRow, expired: ColumnElement[bool]) -> bool:
        """Hand a dead worker's task to others, or give it up; False when its worker was only slow."""
        deaths = task.deaths + 1
        # The attempt rises, so that a worker that was only slow can no longer write.
        values: dict[str, Any] = {
            "deaths": deaths,
            "lease_until": None,
            "worker_id": None,
            "attempt": claim.attempt + 1,
        }
        try:
            if deaths < MOST_DEATHS_OF_A_TASK:
                self._hand_on(claim, values, task.worker_id, expired)
            elif claim.kind is TaskKind.estimate:
                self._end_estimate(claim, values | {"error": conclude.death(claim)}, expired)
            elif claim.kind is TaskKind.plan:
                self._fail_job(claim, conclude.death(claim), values, expired)
            elif claim.kind is TaskKind.trial:
                self._end_trial(claim, conclude.crashed(claim), values, expired)
            else:
                values |= {"outcome": Outcome.crashed}
                self._end_verify(claim, None, values, conclude.death(claim), expired)
        except (LeaseLost, NotOurs):  # what this worker cannot read is left to the control plane
            return False
        log.warning("a worker died", worker=task.worker_id, task=task.id, job=task.job_id, deaths=deaths)
        return True

    def _conclude_claim(
        self,
        job_id: str,
        make: Callable[[JobHistory], Made],
        write: Callable[[Session, float, JobRow, Made], Written],
    ) -> Written:
        """Conclude a job whose task a worker holds; LeaseLost when the job was deleted meanwhile."""
        try:
            return self.conclude(job_id, make, write)
        except NotFound as error:
            raise LeaseLost(str(error)) from None

    def _conclude_or_fail(
        self,
        claim: JobClaim,
        make: Callable[[JobHistory], Made],
        write: Callable[[Session, float, JobRow, Made], None],
        values: dict[str, Any],
        *held: ColumnElement[bool],
    ) -> None:
        """Conclude the job (`_conclude_claim`).

        If no recommendation can be computed, the job fails instead, and `values` are written to the claimed task.
        """
        try:
            self._conclude_claim(claim.job_id, make, write)
        except Inconclusive as error:
            if isinstance(error, Unreadable) and self._is_of_a_worker:
                raise _not_ours(claim.job_id) from error
            self._fail_job(claim, str(error), values, *held)

    def _pause(self, deaths: int) -> float:
        """Seconds before a task is tried again: doubled with each death and drawn, so that not all return at once."""
        return self._retry * 2.0 ** (deaths - 1) * random.uniform(0.5, 1.0)

    def _hand_on(self, claim: Claim, values: dict[str, Any], worker: str | None, expired: ColumnElement[bool]) -> None:
        state = TaskState.queued
        with self.writing() as (session, now):
            if claim.kind is not TaskKind.estimate:
                if _job(session, claim).status.ended:
                    state = TaskState.cancelled
                told = {"task": claim.task_id, "worker": worker, "deaths": values["deaths"]}
                events.append(session, claim.job_id, "worker-died", now, **told)
            waits = {"state": state, "started_at": None, "not_before": now + self._pause(values["deaths"])}
            leases.write(session, claim, values | waits, expired)

    def _fail_job(self, claim: JobClaim, reason: str, values: dict[str, Any], *held: ColumnElement[bool]) -> None:
        def write(session: Session, now: float, job: JobRow, last: dict[str, Any]) -> None:
            leases.write(session, claim, {"state": TaskState.cancelled, "finished_at": now} | values, *held)
            if not job.status.ended:
                lifecycle.end(session, job, JobStatus.failed, now, error=reason, **last)

        self._conclude_claim(claim.job_id, conclude.last_recommendation_column, write)

    def _end_trial(
        self, claim: TrialClaim, measurement: Measurement, values: dict[str, Any], *held: ColumnElement[bool]
    ) -> None:
        values = values | {"result": measurement.model_dump(mode="json"), "outcome": measurement.outcome}

        def conclusion(known: JobHistory) -> Stored:
            return conclude.best(known.with_trial(claim, measurement), final=False)

        def write(session: Session, now: float, job: JobRow, best: Stored) -> None:
            told = {"number": claim.request.number, "outcome": measurement.outcome, "reason": measurement.reason}
            events.append(session, job.id, "trial", now, task=claim.task_id, **told)
            self._record(session, claim, job, values, best, now, *held)

        self._conclude_or_fail(claim, conclusion, write, values, *held)

    def _end_verify(
        self,
        claim: VerifyClaim,
        verification: Verification | None,
        values: dict[str, Any],
        note: str,
        *held: ColumnElement[bool],
    ) -> None:
        def conclusion(known: JobHistory) -> Stored:
            return conclude.best(known.with_verification(claim, verification), final=False)

        def write(session: Session, now: float, job: JobRow, best: Stored) -> None:
            told = {"number": 0, "outcome": values["outcome"], "note": note}
            events.append(session, job.id, "verified", now, task=claim.task_id, **told)
            self._record(session, claim, job, values, best, now, *held)

        self._conclude_or_fail(claim, conclusion, write, values, *held)

    def _record(
        self,
        session: Session,
        claim: JobClaim,
        job: JobRow,
        values: dict[str, Any],
        best: Stored,
        now: float,
        *held: ColumnElement[bool],
    ) -> None:
        """End a trial or verification: give it its place in the history, and have the plan look again."""
        order = job.history_version + 1
        values = values | {"state": TaskState.done, "finished_at": now, "finish_order": order}
        leases.write(session, claim, values, *held)
        if job.status is JobStatus.running:
            change(session, job.id, history_version=order, recommendation=best)
            queue_plan(session, job._replace(history_version=order), now)
        else:
            change(session, job.id, history_version=order)

    def _end_estimate(self, claim: EstimateClaim, values: dict[str, Any], *held: ColumnElement[bool]) -> None:
        with self.writing() as (session, now):
            ended = {"state": TaskState.done, "finished_at": now, "lease_until": None}
            leases.write(session, claim, values | ended, *held)


def _kept(log: str) -> str:
    """The end of what a task has printed, as it is stored."""
    return storable(log[-MOST_LOG:])


def _not_ours(job_id: str | None) -> NotOurs:
    """What a worker on the database waits with: it, or whoever wrote the job, is of an older version."""
    told = f"Another version of dynotune wrote job {job_id}, and this worker cannot read it: "
    return NotOurs(f"{told}bring both to one version, or cancel the job.")


def _readable(claimed: dict[str, Any]) -> Claim | None:
    """The claim of a task; None where this version cannot read it, which must not keep the others waiting."""
    try:
        return CLAIM.validate_python(claimed)
    except ValidationError as error:
        log.warning("a task cannot be read", task=claimed["task_id"], reason=first_line(error))
        return None


def _job(session: Session, claim: JobClaim, lock: bool = True) -> JobRow:
    """The row of the job that a claim belongs to; LeaseLost when the job was deleted meanwhile."""
    try:
        return job_of(session, claim.job_id, lock)
    except NotFound as error:
        raise LeaseLost(str(error)) from None

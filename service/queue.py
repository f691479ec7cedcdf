"""The queue in SQL, the only writer of state: leases, heartbeat, attempt fence, reaper. One code for both databases.

Every method is one short transaction. Claims go through a partial index on the literal state 'queued'; the
row is locked with SKIP LOCKED on PostgreSQL, by the one writer on SQLite. Time is the database's on
PostgreSQL and an injected clock on SQLite.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from sqlalchemy import (
    CursorResult,
    Engine,
    delete,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.orm import Session

from service import events, history
from service.broker import LEASE_SECONDS
from service.contract.estimate import Estimate, EstimateClaim
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome, Verification
from service.contract.task import Claim, PlanDecision, PlanInput, TaskKind, TrialRequest, Wish
from service.enqueue import new_id, queue_plan, queue_task, servable
from service.errors import LeaseLost, NotFound, NotYet
from service.estimates import Estimates
from service.models import Job, JobLabel, Task, Worker
from service.recommend import recommend

MAX_DEATHS = 3
FORGOTTEN_SECONDS = 24 * 3600.0
QUEUED = Task.state == literal_column("'queued'")
RUNNING = Task.state == literal_column("'running'")


class Queue:
    """The broker's SQL form, and the few writes of the control plane (submit, cancel, stop)."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float] = time.time, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        self.engine = engine
        self.estimates = Estimates(engine)
        self._lease = lease_seconds
        self._clock = clock

    def _now(self, session: Session) -> float:
        if self.engine.dialect.name == "postgresql":
            return float(session.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0.0)
        return self._clock()

    # --- what users ask -------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec) -> str:
        """Queue a job; its id."""
        job_id = new_id()
        with Session(self.engine) as session, session.begin():
            now = self._now(session)
            job = Job(
                id=job_id,
                name=spec.name,
                spec=spec.model_dump(mode="json"),
                status="queued",
                phase="queued",
                created_at=now,
                history_version=0,
            )
            session.add(job)
            session.flush()
            session.add_all(JobLabel(job_id=job_id, key=key, value=value) for key, value in spec.labels.items())
            queue_plan(session, job, now)
            events.append(session, job_id, "submitted", now, name=spec.name)
        return job_id

    def cancel(self, job_id: str) -> None:
        """End a job now and keep nothing running; NotFound, or NotYet when it has ended otherwise."""
        with Session(self.engine) as session, session.begin():
            job = self._job(session, job_id)
            if job.status == "cancelled":
                return
            self._must_be_open(job)
            best = self._recommend(session, job, final=True)
            self._end(session, job, "cancelled", self._now(session), recommendation=best, wish=Wish.cancel)

    def stop(self, job_id: str) -> str:
        """End a job now with the best so far; its status. NotFound, or NotYet when it has ended already."""
        with Session(self.engine) as session, session.begin():
            job = self._job(session, job_id)
            self._must_be_open(job)
            now = self._now(session)
            best = self._recommend(session, job, final=True)
            if best is None:
                error = "The job was stopped before any trial had succeeded, so there is nothing to recommend."
                self._end(session, job, "failed", now, error=error, wish=Wish.stop)
            else:
                self._end(session, job, "succeeded", now, recommendation=best, wish=Wish.stop)
            return job.status

    # --- what workers ask -----------------------------------------------------------------------------------

    def register(self, worker_id: str, pid: int, facts: HardwareFacts) -> None:
        """Announce a worker; without effect on one that is known."""
        with Session(self.engine) as session, session.begin():
            if session.get(Worker, worker_id) is not None:
                return
            now = self._now(session)
            values = {"facts": facts.model_dump(mode="json"), "fingerprint": facts.fingerprint}
            session.add(Worker(id=worker_id, pid=pid, state="idle", started_at=now, seen_at=now, **values))

    def leave(self, worker_id: str) -> None:
        """Forget a worker that has ended in order."""
        with Session(self.engine) as session, session.begin():
            session.execute(delete(Worker).where(Worker.id == worker_id))

    def claim(self, worker_id: str, kinds: tuple[TaskKind, ...]) -> Claim | None:
        """Lease the next task the worker's hardware can serve; plans come first, then the oldest job."""
        with Session(self.engine) as session, session.begin():
            worker = session.get(Worker, worker_id)
            if worker is None:
                return None
            now = self._now(session)
            worker.state, worker.task_id, worker.seen_at = "idle", None, now
            picked = (
                select(Task.seq)
                .join(Job, Job.id == Task.job_id)
                .where(QUEUED, Task.kind.in_([kind.value for kind in kinds]), *servable(worker))
                .order_by(Task.rank, Task.job_seq, Task.seq)
                .limit(1)
                # The job's row too, else this would wait for it with the task locked: a deadlock with finish.
                .with_for_update(skip_locked=True, of=(Task, Job))
                .cte("picked")
            )
            task = session.scalars(
                update(Task)
                .where(Task.seq.in_(select(picked.c.seq)), QUEUED)
                .values(
                    state="running",
                    attempt=Task.attempt + 1,
                    worker_id=worker_id,
                    lease_until=now + self._lease,
                    started_at=func.coalesce(Task.started_at, now),
                    progress=None,
                )
                .returning(Task)
                .execution_options(synchronize_session=False)
            ).one_or_none()
            if task is None:
                return None
            job = self._job(session, task.job_id)
            self._start(session, job, worker, now)
            task.base_version = job.history_version
            worker.state, worker.task_id = "busy", task.id
            return Claim(
                task_id=task.id,
                attempt=task.attempt,
                job_id=task.job_id,
                kind=TaskKind(task.kind),
                spec=JobSpec.model_validate(job.spec),
                payload=task.payload,
            )

    def renew(self, claim: Claim, progress: str | None = None) -> Wish | None:
        """Extend the lease and ask what the user wishes; LeaseLost when it is no longer held."""
        with Session(self.engine) as session, session.begin():
            now = self._now(session)
            values: dict[str, Any] = {"lease_until": now + self._lease}
            if progress is not None:
                values["progress"] = progress[:200]
            self._fenced(session, claim, values)
            session.execute(update(Worker).where(Worker.task_id == claim.task_id).values(seen_at=now))
            job = self._job(session, claim.job_id, lock=False)
            if job.status in ("queued", "running"):
                return None
            return Wish(job.wish) if job.wish else Wish.cancel

    def plan_input(self, claim: Claim) -> PlanInput:
        """What the claimed plan may know. Remembers the version it saw, against lost wake-ups."""
        with Session(self.engine) as session, session.begin():
            job = self._job(session, claim.job_id)
            self._fenced(session, claim, {"base_version": job.history_version})
            return history.plan_input(session, job, self._now(session))

    def finish_plan(self, claim: Claim, decision: PlanDecision) -> None:
        """Carry out a decision; one made on an older history queues another plan instead of ending the job."""
        with Session(self.engine) as session, session.begin():
            now = self._now(session)
            job = self._job(session, claim.job_id)
            self._fenced(session, claim, {"state": "done", "finished_at": now, "lease_until": None})
            if job.status != "running":
                return
            seen = session.scalar(select(Task.base_version).where(Task.id == claim.task_id))
            stale = seen != job.history_version
            for request in decision.trials:
                queue_task(session, job, TaskKind.trial, request, now)
            if decision.verify and not stale:
                queue_task(session, job, TaskKind.verify, decision.verify, now)
            job.phase = decision.phase
            job.planned_trials = decision.planned_trials or job.planned_trials
            job.notes = list(dict.fromkeys([*(job.notes or []), *decision.notes]))
            if stale:
                queue_plan(session, job, now)
            elif decision.finish:
                best = self._recommend(session, job, final=True)
                failed = decision.error
                if best is None and failed is None:
                    failed = self._nothing_stable(session, job)
                self._end(session, job, "failed" if failed else "succeeded", now, error=failed, recommendation=best)
            session.flush()

    def finish_trial(self, claim: Claim, measurement: Measurement, log: str) -> None:
        """Record a trial."""
        data = measurement.model_dump(mode="json")
        self._finish(claim, data, measurement.outcome, log, "trial", reason=measurement.reason)

    def finish_verify(self, claim: Claim, verification: Verification, log: str) -> None:
        """Record a verification."""
        self._finish(claim, verification.model_dump(mode="json"), "ok", log, "verified", note=verification.note)

    def release(self, claim: Claim) -> None:
        """Hand a task back unfinished; when its job has ended, close it instead."""
        with Session(self.engine) as session, session.begin():
            job = self._job(session, claim.job_id)
            state = "queued" if job.status in ("queued", "running") else "cancelled"
            # Begun anew, or the time it waits would count as time used.
            values = {"state": state, "worker_id": None, "lease_until": None, "started_at": None}
            self._fenced(session, claim, values)

    def fail_job(self, claim: Claim, reason: str, log: str = "") -> None:
        """End the job with a sentence; what was learnt before stays recommended."""
        with Session(self.engine) as session, session.begin():
            now = self._now(session)
            job = self._job(session, claim.job_id)
            self._fenced(session, claim, {"state": "cancelled", "finished_at": now, "log": log})
            if job.status in ("queued", "running"):
                best = self._recommend(session, job, final=True)
                self._end(session, job, "failed", now, error=reason, recommendation=best)

    def claim_estimate(self, worker_id: str, fingerprint: str) -> EstimateClaim | None:
        """See service.estimates."""
        return self.estimates.claim(worker_id, fingerprint)

    def finish_estimate(self, claim: EstimateClaim, estimate: Estimate | None, error: str | None = None) -> None:
        """See service.estimates."""
        self.estimates.finish(claim, estimate, error)

    def reap(self) -> int:
        """Requeue the tasks whose lease ran out; the third death of a task poisons it."""
        with Session(self.engine) as session, session.begin():
            now = self._now(session)
            session.execute(delete(Worker).where(Worker.seen_at < now - FORGOTTEN_SECONDS))
            expired = (RUNNING, Task.lease_until < now)
            buried = 0
            for seq, job_id in session.execute(select(Task.seq, Task.job_id).where(*expired)).all():
                job = self._job(session, job_id)
                task = session.scalars(select(Task).where(Task.seq == seq, *expired).with_for_update()).one_or_none()
                if task is not None:
                    self._bury(session, job, task, now)
                    buried += 1
            return buried

    # --- inside ---------------------------------------------------------------------------------------------

    def _bury(self, session: Session, job: Job, task: Task, now: float) -> None:
        task.deaths, task.lease_until, task.worker_id = task.deaths + 1, None, None
        task.attempt += 1  # so that a worker that was only slow can no longer write
        events.append(session, job.id, "worker-died", now, task=task.id, deaths=task.deaths)
        if job.status not in ("queued", "running"):
            task.state = "cancelled"
        elif task.deaths < MAX_DEATHS:
            task.state, task.started_at = "queued", None
        elif task.kind == TaskKind.plan:
            task.state, task.finished_at = "done", now
            error = f"Planning ended {MAX_DEATHS} workers; see their logs."
            best = self._recommend(session, job, final=True)
            self._end(session, job, "failed", now, error=error, recommendation=best)
        else:
            reason = f"{MAX_DEATHS} workers died while running this; it is not tried again."
            task.state, task.finished_at, task.outcome = "done", now, Outcome.crashed
            if task.kind == TaskKind.trial:
                request = TrialRequest.model_validate(task.payload)
                poisoned = Measurement(configuration=request.configuration, outcome=Outcome.crashed, reason=reason)
                task.result = poisoned.model_dump(mode="json")
            self._learnt(session, job, task, now)

    def _finish(self, claim: Claim, data: dict[str, Any], outcome: str, log: str, event: str, **more: Any) -> None:
        with Session(self.engine) as session, session.begin():
            now = self._now(session)
            job = self._job(session, claim.job_id)
            values = {"state": "done", "result": data, "outcome": str(outcome), "log": log, "finished_at": now}
            self._fenced(session, claim, values)
            task = session.scalars(select(Task).where(Task.id == claim.task_id)).one()
            self._learnt(session, job, task, now)
            events.append(session, job.id, event, now, task=task.id, number=task.number, outcome=str(outcome), **more)

    def _learnt(self, session: Session, job: Job, task: Task, now: float) -> None:
        """A task of the job ended: give it its place in the history, and have the plan look again."""
        job.history_version += 1
        task.finish_order = job.history_version
        if job.status == "running":
            queue_plan(session, job, now)

    def _fenced(self, session: Session, claim: Claim, values: dict[str, Any]) -> None:
        done = cast(
            "CursorResult[Any]",
            session.execute(
                update(Task)
                .where(Task.id == claim.task_id, Task.attempt == claim.attempt, RUNNING)
                .values(**values)
                .execution_options(synchronize_session=False)
            ),
        )
        if done.rowcount == 0:
            raise LeaseLost(f"task {claim.task_id} is no longer held at attempt {claim.attempt}")

    def _start(self, session: Session, job: Job, worker: Worker, now: float) -> None:
        """The first claim decides the hardware: timings of different hardware never mix within a job."""
        if job.status != "queued":
            return
        job.status, job.phase, job.started_at = "running", "baseline", now
        job.fingerprint, job.facts = worker.fingerprint, worker.facts
        session.execute(update(Task).where(Task.job_id == job.id).values(fingerprint=worker.fingerprint))
        events.append(session, job.id, "started", now, worker=worker.id, device=worker.facts["name"])

    def _end(
        self,
        session: Session,
        job: Job,
        status: str,
        now: float,
        error: str | None = None,
        recommendation: dict[str, Any] | None = None,
        wish: Wish | None = None,
    ) -> None:
        job.status, job.phase, job.finished_at, job.error = status, "done", now, error
        job.recommendation, job.wish = recommendation, wish
        session.execute(update(Task).where(Task.job_id == job.id, QUEUED).values(state="cancelled"))
        events.append(session, job.id, status, now, error=error)

    def _recommend(self, session: Session, job: Job, final: bool) -> dict[str, Any] | None:
        if job.facts is None:
            return None
        best = recommend(
            job.id,
            JobSpec.model_validate(job.spec),
            HardwareFacts.model_validate(job.facts),
            history.trials(session, job.id),
            history.verifications(session, job.id),
            tuple(job.notes or ()),
            final,
        )
        return best.model_dump(mode="json") if best else None

    def _nothing_stable(self, session: Session, job: Job) -> str:
        """Why a job whose trials ran has nothing to recommend."""
        found = history.verifications(session, job.id).values()
        reasons = [reason for one in found if one for verdict in one.verdicts for reason in verdict.reasons]
        return "No configuration was stable: " + "; ".join(dict.fromkeys(reasons)) + "."

    def _must_be_open(self, job: Job) -> None:
        if job.status not in ("queued", "running"):
            raise NotYet(f"Job {job.id} has already ended as {job.status}.")

    def _job(self, session: Session, job_id: str, lock: bool = True) -> Job:
        query = select(Job).where(Job.id == job_id)
        job = session.scalars(query.with_for_update() if lock else query).one_or_none()
        if job is None:
            raise NotFound(f"There is no job {job_id!r}.")
        return job

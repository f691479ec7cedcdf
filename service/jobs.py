"""Reads jobs, trials and workers from the database, in the form in which the API shows them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import ValidationError
from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.orm import Session, defer

from service import events, history, stored
from service.contract import views
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.recommendation import Recommendation
from service.contract.states import JobStatus, TaskState
from service.contract.task import VERIFY_SHARE, TaskKind, TrialRequest, VerifyRequest
from service.errors import OTHER_VERSION, NotFound, NotYet, OtherVersion
from service.models import Job, JobLabel, Task, Worker

# What is long in a job's row and not shown by a list.
UNLISTED = [defer(column, raiseload=True) for column in (Job.recommendation, Job.facts, Job.notes)]


def get(session: Session, job_id: str, owner: str | None = None) -> Job:
    """The row of a job; NotFound when there is none, or when it is not of `owner` (None sees the jobs of all)."""
    job = session.scalars(select(Job).where(Job.id == job_id)).one_or_none()
    if job is None or owner not in (None, job.owner):
        raise NotFound(f"There is no job {job_id!r}.")
    return job


@dataclass(frozen=True)
class Wanted:
    """Which jobs a list shows: those that meet every condition that is given. Times are seconds since 1970 (UTC)."""

    owner: str | None = None
    status: JobStatus | None = None
    label: tuple[str, str] | None = None
    name: str | None = None
    created_after: float | None = None
    created_before: float | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        """The conditions in SQL."""
        if self.owner is not None:
            yield Job.owner == self.owner
        if self.status is not None:
            yield Job.status == self.status
        if self.label is not None:
            key, value = self.label
            yield exists().where(JobLabel.job_id == Job.id, JobLabel.key == key, JobLabel.value == value)
        if self.name is not None:
            yield Job.name.icontains(self.name, autoescape=True)
        if self.created_after is not None:
            yield Job.created_at > self.created_after
        if self.created_before is not None:
            yield Job.created_at < self.created_before


def page(session: Session, wanted: Wanted, before: int | None, limit: int, now: float) -> views.JobPage:
    """Up to `limit` jobs, newest first, and the cursor of the next page (None on the last page)."""
    query = select(Job).where(*wanted.conditions()).order_by(Job.seq.desc()).limit(limit + 1).options(*UNLISTED)
    if before is not None:
        query = query.where(Job.seq < before)
    jobs = session.scalars(query).all()
    items = tuple(summary(job, now) for job in jobs[:limit])
    return views.JobPage(items=items, next=str(jobs[limit - 1].seq) if len(jobs) > limit else None)


def summary(job: Job, now: float) -> views.JobSummary:
    """A job as lists show it."""
    elapsed = max(0.0, (job.finished_at or now) - job.started_at) if job.started_at is not None else 0.0
    spec = job.spec
    return views.JobSummary.of(
        job, labels=spec.get("labels", {}), priority=spec.get("priority", 0), elapsed_seconds=round(elapsed, 1)
    )


def view(session: Session, job: Job, now: float) -> views.JobView:
    """A single job: status, phase, progress, best so far, estimated finish, and why it waits.

    OtherVersion where another version wrote what this one cannot read.
    """
    try:
        spec = JobSpec.model_validate(job.spec)
    except ValidationError as error:
        raise OtherVersion(f"{OTHER_VERSION} It is {job.status}; it can be cancelled, and deleted.") from error
    counts: dict[str, int] = {}
    rows = session.execute(
        select(Task.state, Task.outcome, func.count())
        .where(Task.job_id == job.id, Task.kind == TaskKind.trial)
        .group_by(Task.state, Task.outcome)
    )
    for state, outcome, count in rows:
        counts[outcome or state] = counts.get(outcome or state, 0) + count
    running = session.scalars(select(Task).where(Task.job_id == job.id, Task.state == TaskState.running)).all()
    waits = waiting_for(session, job, spec, now)
    return views.JobView(
        **dict(summary(job, now)),
        version=events.last(session, job.id),
        progress=views.JobProgress(trials=counts, planned=job.planned_trials, now=_doing(running)),
        best=_best(recommendation(job)) if job.recommendation else None,
        estimated_finish_at=None if waits else _expected_end(session, job, spec, now),
        waiting_for=waits,
        notes=tuple(job.notes or ()),
        spec=spec,
    )


def _doing(running: Iterable[Task]) -> str | None:
    """What the job's first running task is doing. Plans are left out, because they take only a moment."""
    for task in running:
        if task.kind != TaskKind.plan:
            number = f" {task.number}" if task.kind == TaskKind.trial else ""
            return f"{task.kind}{number}: {task.progress or 'starting'}"
    return None


def _best(best: Recommendation) -> views.BestSoFar:
    speed, speedup = best.evidence.tokens_per_second, best.evidence.speedup
    return views.BestSoFar.of(
        best.configuration,
        tokens_per_second=speed,
        speedup=speedup,
        stable=best.stability.stable,
        objective=best.evidence.objective,
    )


def _expected_end(session: Session, job: Job, spec: JobSpec, now: float) -> float | None:
    """When the job is expected to end: at its time limit, or sooner, by the median duration of its trials so far.

    Once the verification runs, it is when that is expected to end, though it were after the time limit.
    """
    if job.status != JobStatus.running or job.started_at is None:
        return job.finished_at
    verifying = session.scalars(
        select(Task).where(Task.job_id == job.id, Task.kind == TaskKind.verify, Task.state == TaskState.running)
    ).first()
    if verifying is not None:
        request = VerifyRequest.model_validate(verifying.payload)
        return max(now, (verifying.started_at or now) + request.expected_seconds)
    used = history.elapsed(session, job.id, now)
    by_time = now + max(0.0, spec.search.minutes * 60 - used)
    spans = session.execute(
        select(Task.started_at, Task.finished_at).where(
            Task.job_id == job.id, Task.kind == TaskKind.trial, Task.finished_at.is_not(None)
        )
    ).all()
    if not spans:
        return by_time
    typical = statistics.median((stop or now) - (start or now) for start, stop in spans)
    # How long the verification takes is unknown until it is planned; it is taken to be this share of what was used.
    return min(by_time, now + max(0, spec.search.trials - len(spans)) * typical + VERIFY_SHARE * used)


def waiting_for(session: Session, job: Job, spec: JobSpec, now: float) -> str | None:
    """Why no worker takes the job's queued tasks; None when a worker runs one of them or is free to take one."""
    states = set(session.scalars(select(Task.state).where(Task.job_id == job.id).distinct()))
    if JobStatus(job.status).ended or TaskState.running in states or TaskState.queued not in states:
        return None
    alive = session.scalars(select(Worker).where(history.alive(now))).all()
    if not alive:
        return "No worker is connected; start one with `dynotune worker`."
    reasons = {worker.id: unfit(worker, spec) or _changed(worker, job) for worker in alive}
    fitting = [worker for worker in alive if reasons[worker.id] is None]
    if not fitting:
        every = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        return f"No connected worker can serve it: {every}."
    # A worker's row says `busy` until the worker's next claim, so a worker is busy only if the row's task still runs.
    named = [worker.task_id for worker in fitting]
    busy = select(Task.id).where(Task.id.in_(named), Task.state == TaskState.running)
    if len(session.scalars(busy).all()) < len(fitting):
        return None
    return "All fitting workers are busy with other jobs."


def unfit(worker: Worker, spec: JobSpec) -> str | None:
    """Why a worker can never take a job's tasks, or None: the conditions of `enqueue.MET`, put in words."""
    wanted, facts = spec.hardware, HardwareFacts.model_validate(worker.facts)
    if worker.draining:
        return "is about to end"
    if wanted.device not in ("auto", facts.device):
        return f"is a {facts.device} worker, the job wants {wanted.device}"
    if wanted.name and wanted.name.lower() not in facts.name.lower():
        return f"has {facts.name}, the job wants {wanted.name}"
    if wanted.memory_gib and wanted.memory_gib * 2**30 > facts.memory_bytes:
        return f"has {facts.memory_bytes / 2**30:.1f} GiB, the job wants {wanted.memory_gib:g}"
    return None


def _changed(worker: Worker, job: Job) -> str | None:
    """Why a worker cannot go on with a job that was begun on other hardware, or None."""
    if job.fingerprint and job.facts and job.fingerprint != worker.fingerprint:
        began, facts = HardwareFacts.model_validate(job.facts), HardwareFacts.model_validate(worker.facts)
        return (
            f"is not what the job was begun on ({_differences(began, facts)}), and timings are compared on one only: "
            "stop the job to keep its best so far, and submit it again to measure here"
        )
    return None


def _differences(before: HardwareFacts, now: HardwareFacts) -> str:
    """The facts in which a worker's hardware differs from the hardware that a job began on, as text."""
    old, new = (
        {"device": facts.device, "name": facts.name, "cores": facts.cores, "driver": facts.driver}
        | {"memory": f"{facts.memory_bytes >> 30} GiB"}
        | facts.versions
        for facts in (before, now)
    )
    changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return ", ".join(f"{name} {new.get(name)} instead of {old.get(name)}" for name in changed)


def recommendation(job: Job) -> Recommendation:
    """The stored recommendation: the final one, or the best so far; NotYet with the reason when there is none.

    Nothing is computed here, because the queue stores the best so far with every task that ends. OtherVersion where
    another version wrote what this one cannot read.
    """
    if job.recommendation:
        try:
            return stored.recommendation(job.recommendation)
        except ValueError as error:
            raise OtherVersion(OTHER_VERSION) from error
    if job.status == JobStatus.failed:
        raise NotYet(f"Job {job.id} failed, so there is no recommendation: {job.error}")
    if job.status == JobStatus.cancelled:
        raise NotYet(f"Job {job.id} was cancelled before any trial had succeeded.")
    raise NotYet(f"Job {job.id} has no successful trial yet.")


def trials(session: Session, job: Job, after: int = 0, limit: int | None = None) -> tuple[views.ListedTrial, ...]:
    """The job's trials by number, from that after `after` on, at most `limit`.

    `fastest` marks those of the configuration that is recommended so far.
    """
    rows = session.scalars(
        select(Task)
        .where(Task.job_id == job.id, Task.kind == TaskKind.trial, Task.number > after)
        .order_by(Task.number)
        .limit(limit)
    )
    page = [trial_view(row) for row in rows]
    try:
        best = recommendation(job).evidence.measurement.configuration if job.recommendation else None
    except OtherVersion:  # its trials may still be read
        best = None
    return tuple(views.ListedTrial(**dict(one), fastest=one.configuration == best) for one in page)


def trial_view(row: Task) -> views.TrialView:
    """The view of a trial from its task's row, with its measurement once it has ended."""
    request = TrialRequest.model_validate(row.payload)
    return views.TrialView.of(
        row,
        origin=request.origin,
        progress=row.progress if row.state == TaskState.running else None,
        configuration=request.configuration,
        measurement=row.result,
    )


def trial(session: Session, trial_id: str, owner: str | None = None) -> views.LoggedTrial:
    """A trial with the end of its output; NotFound when there is none that `owner` may see."""
    query = select(Task).where(Task.id == trial_id, Task.kind == TaskKind.trial)
    if owner is not None:
        query = query.join(Job, Job.id == Task.job_id).where(Job.owner == owner)
    row = session.scalars(query).one_or_none()
    if row is None:
        raise NotFound(f"There is no trial {trial_id!r}.")
    return views.LoggedTrial(**dict(trial_view(row)), log=row.log)


def workers_alive(session: Session, now: float) -> int:
    """How many workers have given a sign of life lately."""
    return session.scalar(select(func.count()).where(history.alive(now))) or 0


def workers(session: Session, now: float) -> tuple[views.WorkerView, ...]:
    """All known workers, those not seen for a while included."""
    rows = session.scalars(select(Worker).order_by(Worker.started_at)).all()
    return tuple(views.WorkerView.of(row, alive=row.seen_at > now - history.ALIVE_SECONDS) for row in rows)

"""Reads from the database what a job's plan and its recommendation are computed from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from sqlalchemy import ColumnElement, bindparam, func, or_, select
from sqlalchemy.orm import Session

from service import logs
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome, Verification
from service.contract.objective import minimises_memory
from service.contract.states import Origin, TaskState
from service.contract.task import (
    EarlierTrial,
    PlanInput,
    TaskKind,
    TrialClaim,
    TrialRecord,
    TrialRequest,
    VerifyClaim,
    VerifyRequest,
)
from service.leases import job_of
from service.models import JOBS, TASKS, Job, Task, Worker
from service.stored import completed
from service.text import first_line

log = logs.logger("dynotune.history")
EARLIER_JOBS, EARLIER_TRIALS = 5, 60  # the last ones, which order the trials of a job on the same hardware
# A job's finished trials, in the order in which they finished, and its finished verifications.
T = TASKS.c
ENDED = select(T.payload, T.result).where(T.job_id == bindparam("job"), T.state == TaskState.done)
ENDED_TRIALS = ENDED.where(T.kind == TaskKind.trial).order_by(T.finish_order)
ENDED_VERIFICATIONS = ENDED.where(T.kind == TaskKind.verify)
# When each of a job's tasks ran. One that still runs has no end.
SPANS = (
    select(T.kind, T.started_at, T.finished_at)
    .where(T.job_id == bindparam("job"), T.started_at.is_not(None))
    .where(or_(T.finished_at.is_not(None), T.state == TaskState.running))
)
ALIVE_SECONDS = 30.0  # since its last sign of life, for which a worker counts as alive


@dataclass(frozen=True)
class JobHistory:
    """All that a job's recommendation is computed from, at one version of the job's history.

    `facts` are the hardware that the job runs on, and None until a worker has begun the job. `spent` is what its time
    went into by its tasks' start and end times, as `time_of_tasks` counts it. If another version wrote the job,
    `is_readable` is false, and only `version` and `job_id` are set.
    """

    version: int
    job_id: str
    spec: JobSpec
    facts: HardwareFacts | None = None
    trials: tuple[TrialRecord, ...] = ()
    verifications: dict[str, Verification | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)
    is_readable: bool = True

    def with_trial(self, claim: TrialClaim, measurement: Measurement) -> JobHistory:
        """The history with one more trial."""
        record = TrialRecord(request=claim.request, measurement=measurement)
        return replace(self, trials=(*self.trials, record))

    def with_verification(self, claim: VerifyClaim, verification: Verification | None) -> JobHistory:
        """The history with one more verification, which is None where it could not be carried out."""
        return replace(self, verifications=self.verifications | {claim.request.method: verification})

    def with_notes(self, notes: Iterable[str]) -> JobHistory:
        """The history with the notes of a plan added; a note that it has already is not repeated."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))


def load(session: Session, job_id: str) -> JobHistory:
    """The job's history as this transaction sees it; NotFound when there is no such job."""
    job = job_of(session, job_id, lock=False)
    any_ended = job.history_version > 0
    with if_readable(job_id):
        return JobHistory(
            version=job.history_version,
            job_id=job_id,
            spec=JobSpec.model_validate(job.spec),
            facts=HardwareFacts.model_validate(job.facts) if job.facts else None,
            trials=trials(session, job_id) if any_ended else (),
            verifications=verifications(session, job_id) if any_ended else {},
            notes=tuple(job.notes or ()),
            spent=time_of_tasks(session, job_id) if any_ended else {},
        )
    return JobHistory(version=job.history_version, job_id=job_id, spec=JobSpec.model_construct(), is_readable=False)


def trials(session: Session, job_id: str) -> tuple[TrialRecord, ...]:
    """The job's finished trials, in the order in which they finished."""
    return tuple(
        TrialRecord(
            request=TrialRequest.model_validate(completed(payload)),
            measurement=Measurement.model_validate(completed(result)),
        )
        for payload, result in session.execute(ENDED_TRIALS, {"job": job_id})
    )


def verifications(session: Session, job_id: str) -> dict[str, Verification | None]:
    """The job's finished verifications by method; None for one that could not be carried out."""
    return {
        VerifyRequest.model_validate(payload).method: Verification.model_validate(completed(result)) if result else None
        for payload, result in session.execute(ENDED_VERIFICATIONS, {"job": job_id})
    }


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of time spans: the time that a job has used, without its waiting for other jobs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def time_of_tasks(session: Session, job_id: str) -> dict[str, float]:
    """What the job's time went into, in seconds: `trials`, all of those that ended; `planning`; and `idle`.

    Idle is the job's wall time during which no task of it ran on any of its workers, from when the job was begun until
    its last task started or ended, by the tasks' own start and end times. Planning is the time during which nothing but
    a plan ran. A task that is handed on because its worker died or was told to end begins anew, so that its first
    attempt counts as idle.
    """
    spans = [(kind, start, stop) for kind, start, stop in session.execute(SPANS, {"job": job_id})]
    began = session.scalar(select(JOBS.c.started_at).where(JOBS.c.id == job_id))
    if not spans or began is None:
        return {}
    until = max(start if stop is None else stop for _, start, stop in spans)  # a task that still runs counts up to then
    used, measured = (
        busy_seconds((start, until if stop is None else stop) for kind, start, stop in spans if kind in kinds)
        for kinds in (tuple(TaskKind), (TaskKind.trial, TaskKind.verify))
    )
    return {
        "trials": sum(max(0.0, (stop or start) - start) for kind, start, stop in spans if kind == TaskKind.trial),
        "planning": max(0.0, used - measured),
        "idle": max(0.0, until - began - used),
    }


def elapsed(session: Session, job_id: str, now: float) -> float:
    """The seconds in which at least one task of the job was running."""
    spans = session.execute(SPANS, {"job": job_id})
    return busy_seconds((start, now if stop is None else stop) for _, start, stop in spans)


def earlier(session: Session, job: Job, spec: JobSpec) -> tuple[EarlierTrial, ...]:
    """Trials of the last jobs on the same hardware that ended before this one began, those of the same job first.

    A search for the least memory has the paces of small micro batches, and peaks are not handed on: so it tells other
    searches nothing, and begins from nothing itself.
    """
    if not spec.search.reuse or minimises_memory(spec):
        return ()
    rows = session.scalars(
        select(Job)
        .where(Job.fingerprint == job.fingerprint, Job.id != job.id, Job.finished_at <= job.started_at)
        .order_by(Job.seq.desc())
        .limit(EARLIER_JOBS)
    )
    found: list[EarlierTrial] = []
    for row in rows:
        with if_readable(row.id):
            other = JobSpec.model_validate(row.spec)
            alike = (other.task, other.baseline) == (spec.task, spec.baseline)
            if alike and not minimises_memory(other):  # as paces are compared with the baseline's
                found += _earlier_trials(trials(session, row.id), _what_is_trained(other) == _what_is_trained(spec))
    return tuple(sorted(found, key=lambda one: not one.same_job)[:EARLIER_TRIALS])


def alive(now: float) -> ColumnElement[bool]:
    """The condition that a worker has given a sign of life lately."""
    return Worker.seen_at > now - ALIVE_SECONDS


@contextmanager
def if_readable(job_id: str) -> Iterator[None]:
    """Skip the rest of the block, with a warning, where the job cannot be read because another version wrote it."""
    try:
        yield
    except ValidationError as error:
        log.warning("a job cannot be read", job=job_id, reason=first_line(error))


def _what_is_trained(spec: JobSpec) -> dict[str, object]:
    """What a job trains, without its name, its priority, its price and how it is searched.

    Revisions are left out too: a recommendation names the commits that were measured, where its job named none.
    """
    left_out: dict[str, Any] = dict.fromkeys(("name", "labels", "priority", "search"), True)
    within = {"hardware": {"price_per_hour"}, "model": {"revision"}, "dataset": {"revision"}}
    return spec.model_dump(exclude=left_out | within)


def _earlier_trials(records: tuple[TrialRecord, ...], same_job: bool) -> list[EarlierTrial]:
    """The successful trials of each method that has a baseline to compare them with."""
    good = [one for one in records if one.measurement.outcome is Outcome.ok and one.measurement.timing]
    paces = {
        one.measurement.configuration.method: _pace(one.measurement)
        for one in good
        if one.request.origin is Origin.baseline
    }
    return [
        EarlierTrial(
            configuration=one.measurement.configuration,
            ratio=_pace(one.measurement) / paces[one.measurement.configuration.method],
            parameters=one.measurement.parameters,
            dataset=one.measurement.dataset.fingerprint if one.measurement.dataset else None,
            same_job=same_job,
        )
        for one in good
        if one.measurement.configuration.method in paces and one.request.origin is not Origin.baseline
    ]


def _pace(measurement: Measurement) -> float:
    """Seconds a sample."""
    timing = measurement.timing
    assert timing is not None
    return timing.seconds / timing.samples


def plan_input(session: Session, job_id: str, now: float) -> PlanInput:
    """The input of the job's plan, as this transaction sees the job."""
    job = session.scalars(select(Job).where(Job.id == job_id)).one()
    open_tasks = session.scalars(
        select(Task)
        .where(Task.job_id == job.id, Task.kind != TaskKind.plan, Task.state.in_((TaskState.queued, TaskState.running)))
        .order_by(Task.seq)
    ).all()
    done = verifications(session, job.id)
    workers = session.scalar(select(func.count()).where(Worker.fingerprint == job.fingerprint, alive(now)))
    last = session.scalar(select(func.max(Task.number)).where(Task.job_id == job.id))
    spec = JobSpec.model_validate(job.spec)
    return PlanInput(
        spec=spec,
        earlier=earlier(session, job, spec),
        facts=HardwareFacts.model_validate(job.facts),
        history=trials(session, job.id),
        open_trials=tuple(
            TrialRequest.model_validate(completed(task.payload)) for task in open_tasks if task.kind == TaskKind.trial
        ),
        verified_methods=tuple(done),  # type: ignore[arg-type]
        verify_open=any(task.kind == TaskKind.verify for task in open_tasks),
        next_number=(last or 0) + 1,
        elapsed_seconds=elapsed(session, job.id, now),
        workers=max(1, workers or 0),
    )

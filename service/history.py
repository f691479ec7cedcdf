"""Reads a job's tasks into what the plan and the recommendation need."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Verification
from service.contract.task import PlanInput, TaskKind, TrialRecord, TrialRequest, VerifyRequest
from service.models import Job, Task, Worker

ALIVE_SECONDS = 30.0


def trials(session: Session, job_id: str) -> tuple[TrialRecord, ...]:
    """Finished trials in finish order."""
    rows = session.scalars(
        select(Task)
        .where(Task.job_id == job_id, Task.kind == TaskKind.trial, Task.state == "done")
        .order_by(Task.finish_order)
    )
    return tuple(
        TrialRecord(
            request=TrialRequest.model_validate(row.payload), measurement=Measurement.model_validate(row.result)
        )
        for row in rows
    )


def verifications(session: Session, job_id: str) -> dict[str, Verification | None]:
    """Finished verifications by method; None where the verification itself could not be carried out."""
    rows = session.scalars(
        select(Task).where(Task.job_id == job_id, Task.kind == TaskKind.verify, Task.state == "done")
    )
    return {
        VerifyRequest.model_validate(row.payload).method: (
            Verification.model_validate(row.result) if row.result else None
        )
        for row in rows
    }


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of time spans: what a job has used, waiting for other jobs not counted."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def elapsed(session: Session, job_id: str, now: float) -> float:
    """Seconds in which at least one task of the job was under way."""
    rows = session.execute(
        select(Task.started_at, Task.finished_at).where(
            Task.job_id == job_id,
            Task.started_at.is_not(None),
            or_(Task.finished_at.is_not(None), Task.state == "running"),
        )
    )
    return busy_seconds((start or now, stop if stop is not None else now) for start, stop in rows)


def plan_input(session: Session, job: Job, now: float) -> PlanInput:
    """The input of the job's plan, as of this transaction."""
    open_tasks = session.scalars(
        select(Task)
        .where(Task.job_id == job.id, Task.kind != TaskKind.plan, Task.state.in_(("queued", "running")))
        .order_by(Task.seq)
    ).all()
    done = verifications(session, job.id)
    workers = session.scalar(
        select(func.count()).where(Worker.fingerprint == job.fingerprint, Worker.seen_at > now - ALIVE_SECONDS)
    )
    last = session.scalar(select(func.max(Task.number)).where(Task.job_id == job.id))
    return PlanInput(
        spec=JobSpec.model_validate(job.spec),
        facts=HardwareFacts.model_validate(job.facts),
        history=trials(session, job.id),
        open_trials=tuple(
            TrialRequest.model_validate(task.payload) for task in open_tasks if task.kind == TaskKind.trial
        ),
        verified_methods=tuple(done),  # type: ignore[arg-type]
        verify_open=any(task.kind == TaskKind.verify for task in open_tasks),
        next_number=(last or 0) + 1,
        elapsed_seconds=elapsed(session, job.id, now),
        workers=max(1, workers or 0),
    )

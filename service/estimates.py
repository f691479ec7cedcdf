"""Estimates in the database: asked for by users, answered by workers, each in one short transaction.

Much simpler than a job's tasks: one question, one answer, and a worker that dies loses nothing but its time.
"""

from __future__ import annotations

from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from service.contract.estimate import Estimate, EstimateClaim, EstimateRequest, Known
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.contract.task import TaskKind
from service.db import now
from service.enqueue import new_id
from service.errors import LeaseLost, NotFound
from service.levers.batching import ROWS
from service.models import EstimateRow, Job, Task

LEASE_SECONDS = 120.0
MANY_KNOWN = 50


class Estimates:
    """The writes of estimates."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def submit(self, request: EstimateRequest) -> str:
        """Queue an estimate; its id."""
        estimate_id = new_id()
        with Session(self._engine) as session, session.begin():
            session.add(
                EstimateRow(
                    id=estimate_id, request=request.model_dump(mode="json"), state="queued", created_at=now(session)
                )
            )
        return estimate_id

    def claim(self, worker_id: str, fingerprint: str) -> EstimateClaim | None:
        """Lease the oldest open estimate, one whose worker fell silent included, or None."""
        with Session(self._engine) as session, session.begin():
            at = now(session)
            open_ = (EstimateRow.state == "queued") | (
                (EstimateRow.state == "running") & (EstimateRow.lease_until < at)
            )
            row = session.scalars(
                select(EstimateRow).where(open_).order_by(EstimateRow.seq).limit(1).with_for_update(skip_locked=True)
            ).one_or_none()
            if row is None:
                return None
            row.state, row.worker_id, row.lease_until = "running", worker_id, at + LEASE_SECONDS
            row.attempt += 1
            request = EstimateRequest.model_validate(row.request)
            return EstimateClaim(
                id=row.id, attempt=row.attempt, request=request, known=known(session, request.spec, fingerprint)
            )

    def finish(self, claim: EstimateClaim, estimate: Estimate | None, error: str | None) -> None:
        """Record the answer, or why there is none; LeaseLost when another worker has taken it."""
        values = {
            "state": "failed" if estimate is None else "done",
            "result": estimate.model_dump(mode="json") if estimate else None,
            "error": error,
            "lease_until": None,
        }
        with Session(self._engine) as session, session.begin():
            held = (EstimateRow.id == claim.id, EstimateRow.attempt == claim.attempt, EstimateRow.state == "running")
            found = session.execute(update(EstimateRow).where(*held).values(**values).returning(EstimateRow.id))
            if found.one_or_none() is None:
                raise LeaseLost(f"estimate {claim.id} is no longer held at attempt {claim.attempt}")


def known(session: Session, spec: JobSpec, fingerprint: str) -> tuple[Known, ...]:
    """Memory lines that trials of the same model measured on the same hardware, the newest ones."""
    rows = session.execute(
        select(Task.result, Job.spec)
        .join(Job, Job.id == Task.job_id)
        .where(Job.fingerprint == fingerprint, Task.kind == TaskKind.trial, Task.outcome == Outcome.ok)
        .order_by(Task.seq.desc())
        .limit(MANY_KNOWN)
    )
    found = []
    for result, stored in rows:
        measurement, theirs = Measurement.model_validate(result), JobSpec.model_validate(stored)
        if measurement.memory_line is None or _model(theirs) != _model(spec) or theirs.task != spec.task:
            continue
        longest = measurement.dataset.longest if measurement.dataset else theirs.dataset.max_length
        packed = measurement.configuration.levers.get("batching") in ROWS
        found.append(
            Known(
                method=measurement.configuration.method,
                levers=measurement.configuration.levers,
                max_length=theirs.dataset.max_length if packed else longest,
                line=measurement.memory_line,
            )
        )
    return tuple(found)


def _model(spec: JobSpec) -> tuple[str, str | None]:
    return spec.model.source, spec.model.revision


def view(session: Session, estimate_id: str) -> dict[str, object]:
    """One estimate's state and answer; NotFound."""
    row = session.scalars(select(EstimateRow).where(EstimateRow.id == estimate_id)).one_or_none()
    if row is None:
        raise NotFound(f"There is no estimate {estimate_id!r}.")
    return {"id": row.id, "state": row.state, "result": row.result, "error": row.error}

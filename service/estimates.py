"""Reads estimates, and what trials have measured that makes an estimate better."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.contract.estimate import Known
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.contract.paths import Roots
from service.contract.states import EstimateStatus
from service.contract.task import TaskKind
from service.contract.views import EstimateView
from service.errors import NotFound
from service.history import if_readable
from service.levers.batching import ROWS
from service.models import Job, Task, Worker
from service.settings import named_data_roots

MANY_JOBS, MANY_KNOWN = 500, 50  # the newest jobs on that hardware that are looked at, and their trials


def _lines_of(measurement: Measurement, job: JobSpec) -> list[Known]:
    """What a trial of the job tells of memory: a line, or nothing. What the job's rows take is not the model's."""
    line, rows = measurement.memory_line, measurement.unread_bytes
    if line is None:
        return []
    without = {"rest_bytes": line.rest_bytes - rows, "update_bytes": max(0.0, line.update_bytes - rows)}
    longest = measurement.dataset.longest if measurement.dataset else job.dataset.max_length
    levers = measurement.configuration.levers
    return [
        Known(
            method=measurement.configuration.method,
            levers=levers,
            max_length=job.dataset.max_length if levers.get("batching") in ROWS else longest,
            line=line.model_copy(update=without),
        )
    ]


def known(session: Session, spec: JobSpec, worker_id: str) -> tuple[Known, ...]:
    """Memory lines that trials of the same model measured on the worker's hardware, the newest ones."""
    fingerprint = select(Worker.fingerprint).where(Worker.id == worker_id).scalar_subquery()
    stored = session.execute(
        select(Job.id, Job.spec).where(Job.fingerprint == fingerprint).order_by(Job.seq.desc()).limit(MANY_JOBS)
    )
    specs: dict[str, JobSpec] = {}
    for job_id, one in stored:
        with if_readable(job_id):
            specs[job_id] = JobSpec.model_validate(one)
    roots = Roots(named_data_roots(), Path())
    mine = _model(spec, roots)
    alike = [job_id for job_id, one in specs.items() if one.task == spec.task and _model(one, roots) == mine]
    rows = session.execute(
        select(Task.result, Task.job_id)
        .where(Task.job_id.in_(alike), Task.kind == TaskKind.trial, Task.outcome == Outcome.ok)
        .order_by(Task.seq.desc())
        .limit(MANY_KNOWN)
    )
    found: list[Known] = []
    for result, job_id in rows:
        with if_readable(str(job_id)):
            found += _lines_of(Measurement.model_validate(result), specs[str(job_id)])
    return tuple(found)


def _model(spec: JobSpec, roots: Roots) -> tuple[str, str | None]:
    """What is the same for jobs of the same model: a local folder may be named by several paths."""
    source = spec.model.source
    with suppress(OSError):  # a name that no file can have is one of the hub
        if (path := roots.resolve(source)).is_dir():
            source = str(path.resolve())
    return source, spec.model.revision


def view(session: Session, estimate_id: str, owner: str | None = None) -> EstimateView:
    """An estimate's state, and its result or error once it has one; NotFound, also where it is not of `owner`."""
    row = session.scalars(select(Task).where(Task.id == estimate_id, Task.kind == TaskKind.estimate)).one_or_none()
    if row is None or owner not in (None, row.owner):
        raise NotFound(f"There is no estimate {estimate_id!r}.")
    return EstimateView.model_validate({"id": row.id, "state": state_of(row), "result": row.result, "error": row.error})


def state_of(row: Task) -> EstimateStatus:
    """Where the estimate stands."""
    return EstimateStatus.failed if row.error else EstimateStatus(row.state)

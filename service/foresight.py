"""What is known of a job before it is submitted: who could serve it, what it would search, how long it may take."""

from __future__ import annotations

import math
import statistics

from sqlalchemy import select
from sqlalchemy.orm import Session

from service import history, jobs
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.views import Fit, JobCheck, SpaceView
from service.models import Job, Worker
from service.space import Space, applicable, blocked, space, unavailable

LAST_JOBS = 20  # whose times tell how long jobs take here


def foresee(session: Session, spec: JobSpec, now: float) -> JobCheck:
    """A job's spec with all defaults, and what the living workers make of it."""
    alive = session.scalars(select(Worker).where(history.alive(now))).all()
    fits = {worker.id: jobs.unfit(worker, spec) for worker in alive}
    serving = [worker for worker in alive if fits[worker.id] is None]
    return JobCheck(
        spec=spec,
        workers=tuple(Fit(worker=name, can_serve=reason is None, why_not=reason) for name, reason in fits.items()),
        search=tuple(_space(spec, worker) for worker in serving),
        seconds_at_most=spec.search.minutes * 60,
        seconds_of_jobs_alike=_typical(session, spec, serving),
    )


def _space(spec: JobSpec, worker: Worker) -> SpaceView:
    facts = HardwareFacts.model_validate(worker.facts)
    methods = {method: unavailable(facts, method) or blocked(spec, facts, {}) for method in spec.method}
    spaces: dict[str, Space] = {
        method: applicable(space(spec, facts), method, spec.task) for method in spec.method if methods[method] is None
    }
    return SpaceView(
        worker=worker.id,
        cannot={method: reason for method, reason in methods.items() if reason is not None},
        choices=spaces,
        combinations_at_most=sum(math.prod(map(len, found.values())) for found in spaces.values()),
    )


def _typical(session: Session, spec: JobSpec, serving: list[Worker]) -> float | None:
    """The median duration of the last jobs on that hardware with the same task, methods and limits; None of none."""
    fingerprints = {worker.fingerprint for worker in serving}
    rows = session.scalars(
        select(Job)
        .where(Job.fingerprint.in_(fingerprints), Job.finished_at.is_not(None), Job.started_at.is_not(None))
        .order_by(Job.seq.desc())
        .limit(LAST_JOBS)
    )
    alike: list[float] = []
    for row in rows:
        with history.if_readable(row.id):
            if _task_and_limits(JobSpec.model_validate(row.spec)) == _task_and_limits(spec):
                alike.append((row.finished_at or 0.0) - (row.started_at or 0.0))
    return statistics.median(alike) if alike else None


def _task_and_limits(spec: JobSpec) -> tuple[object, ...]:
    """The parts of a job on which the time it takes depends most; jobs in which these are equal count as alike."""
    search = spec.search
    return spec.task, spec.method, search.minutes, search.trials, search.verify

"""/v1/jobs: submit a job, look at it, stop or cancel it."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from service import events, history, jobs
from service.api.bodies import body_of
from service.api.context import Context, InContext, Reading
from service.api.problems import SUBMITTED, responses
from service.comparisons import pareto, waterfall
from service.contract.job import JobSpec
from service.contract.recommendation import Recommendation
from service.contract.states import JobStatus
from service.contract.views import (
    EventList,
    EventView,
    JobPage,
    JobState,
    JobView,
    MemoryCurve,
    Pareto,
    TrialList,
    Waterfall,
)
from service.db import now
from service.errors import BadQuery, ForeignOrigin, NotFound, NotYet
from service.memory_curve import memory_curve
from service.validate import parse, validate

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

EXAMPLE = {
    "name": "functions-lora",
    "model": {"source": "examples/llama-13m", "weights": "random"},
    "dataset": {"source": "examples/data/functions.jsonl", "max_length": 512},
    "training": {"effective_batch_size": 32, "learning_rate": 2e-4},
    "search": {"minutes": 5, "verify": "quick"},
}


@router.post(
    "",
    status_code=202,
    openapi_extra=body_of(JobSpec, EXAMPLE),
    responses=SUBMITTED,
    summary="Submit a job",
)
async def submit(request: Request, response: Response, here: InContext) -> JobState:
    """Queue a job given as YAML or JSON. Mistakes that can be seen without a worker are answered at once."""
    job_id = await run_in_threadpool(_submit, await request.body(), here)
    response.headers["Location"] = f"/v1/jobs/{job_id}"
    return JobState(id=job_id, status=JobStatus.queued)


def _submit(body: bytes, here: Context) -> str:
    """Validate and queue the job. Runs in a thread, because it reads files and waits for the database."""
    spec = parse(body, JobSpec)
    validate(spec, here.settings)
    return here.queue.submit(spec)


@router.get("", responses=responses(BadQuery), summary="List jobs")
def list_jobs(
    session: Reading,
    status: Annotated[str | None, Query(description="One of " + ", ".join(JobStatus))] = None,
    label: Annotated[str | None, Query(description="key=value", examples=["team=nlp"])] = None,
    cursor: Annotated[str | None, Query(description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> JobPage:
    """Jobs, newest first, in pages: pass `next` on as `cursor` until it is null."""
    if status is not None and status not in set(JobStatus):
        raise BadQuery(f"status must be one of {', '.join(JobStatus)}, not {status!r}.")
    if label is not None and "=" not in label:
        raise BadQuery(f"label must be key=value, not {label!r}.")
    if cursor is not None and not re.fullmatch("[0-9]{1,18}", cursor):
        raise BadQuery(f"cursor must be the `next` of a page before, not {cursor!r}.")
    key, _, value = (label or "").partition("=")
    before = int(cursor) if cursor else None
    wanted = JobStatus(status) if status else None
    return jobs.page(session, wanted, (key, value) if label else None, before, limit, now(session))


@router.get("/{job_id}", responses=responses(NotFound), summary="One job")
def show(job_id: str, session: Reading) -> JobView:
    """Status, phase, progress, the best so far, the estimated finish, and why a queued job waits."""
    return jobs.view(session, jobs.get(session, job_id), now(session))


@router.get("/{job_id}/trials", responses=responses(NotFound), summary="A job's trials")
def trials(job_id: str, session: Reading) -> TrialList:
    """All trials with their outcome, reason and measurement."""
    return TrialList(items=jobs.trials(session, jobs.get(session, job_id)))


@router.get("/{job_id}/events", responses=responses(NotFound), summary="A job's events")
def tail(
    job_id: str,
    session: Reading,
    after: Annotated[int, Query(ge=0, lt=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> EventList:
    """The job's events, oldest first; pass the last `seq` on as `after` to see what has happened since."""
    found = events.tail(session, jobs.get(session, job_id).id, after, limit)
    return EventList(items=tuple(EventView.model_validate(event) for event in found))


@router.get("/{job_id}/memory-curve", responses=responses(NotFound, NotYet), summary="Memory and speed by batch size")
def curve(job_id: str, session: Reading) -> MemoryCurve:
    """Memory and speed of every batch size at which the best configuration so far was probed or timed."""
    best = jobs.recommendation(jobs.get(session, job_id))
    return memory_curve(best.evidence.measurement)


@router.get("/{job_id}/waterfall", responses=responses(NotFound, NotYet), summary="What each lever brings")
def shares(job_id: str, session: Reading) -> Waterfall:
    """How the best configuration's speed-up comes about: what the run takes with each lever alone taken back."""
    evidence = jobs.recommendation(jobs.get(session, job_id)).evidence
    known = history.load(session, job_id)
    return waterfall(known.spec, evidence.measurement, evidence.baseline, known.trials)


@router.get("/{job_id}/pareto", responses=responses(NotFound), summary="Speed against memory")
def front(job_id: str, session: Reading) -> Pareto:
    """The trials that no other beats in both tokens/s and peak memory, fastest first."""
    return pareto(history.load(session, jobs.get(session, job_id).id).trials)


@router.get("/{job_id}/recommendation", responses=responses(NotFound, NotYet), summary="The answer")
def recommendation(job_id: str, session: Reading) -> Recommendation:
    """The fastest stable configuration with its evidence. `final` is false while the job is still searching."""
    return jobs.recommendation(jobs.get(session, job_id))


@router.post(
    "/{job_id}/cancel", status_code=202, responses=responses(NotFound, NotYet, ForeignOrigin), summary="Cancel"
)
def cancel(job_id: str, here: InContext) -> JobState:
    """End the job now; the device is free within seconds."""
    here.queue.cancel(job_id)
    return JobState(id=job_id, status=JobStatus.cancelled)


@router.post("/{job_id}/stop", status_code=202, responses=responses(NotFound, NotYet, ForeignOrigin), summary="Stop")
def stop(job_id: str, here: InContext) -> JobState:
    """End the job now and recommend the best so far."""
    return JobState(id=job_id, status=JobStatus(here.queue.stop(job_id)))

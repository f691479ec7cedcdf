"""/v1/jobs: submit a job, look at it, end it, delete it."""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from service import jobs
from service.access import Caller
from service.api.access import READS, SUBMITS, Called, Existing
from service.api.bodies import body_of
from service.api.context import Context, InContext, Reading
from service.api.problems import responses
from service.contract.job import IDEMPOTENCY_KEY, JobSpec
from service.contract.states import JobStatus
from service.contract.views import JobCheck, JobPage, JobState, JobView
from service.db import now, reading
from service.errors import BadQuery, InvalidJob, KeyReused, MalformedBody, NotFound, NotYet
from service.foresight import foresee
from service.jobtext import merged, read
from service.validate import check as well_formed
from service.validate import parse, validate

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

EXAMPLE = {
    "name": "functions-lora",
    "model": {"source": "examples/llama-13m", "weights": "random"},
    "dataset": {"source": "examples/data/functions.jsonl", "max_length": 512},
    "training": {"effective_batch_size": 32, "learning_rate": 2e-4},
    "search": {"minutes": 5, "verify": "quick"},
}
CHANGES = {"name": "functions-lora, longer", "search": {"minutes": 60}}
MOST_WAIT_SECONDS = 60.0
TIME = "seconds since 1970 in UTC, as in created_at"
ACTED = responses(NotFound, NotYet)
Key = Annotated[
    str | None,
    Header(
        pattern=IDEMPOTENCY_KEY,
        description="The same key with the same job, within a day, answers with the job that the first one made.",
    ),
]


@router.post(
    "",
    status_code=202,
    openapi_extra=body_of(JobSpec, EXAMPLE),
    responses=responses(InvalidJob, MalformedBody, KeyReused),
    dependencies=SUBMITS,
    summary="Submit a job",
)
async def submit(
    request: Request, response: Response, here: InContext, who: Called, idempotency_key: Key = None
) -> JobState:
    """Queue a job given as YAML or JSON. Mistakes that can be seen without a worker are answered at once."""
    job = await run_in_threadpool(_submit, await request.body(), here, who, idempotency_key)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


def _submit(body: bytes, here: Context, who: Caller, idempotency_key: str | None) -> JobState:
    """Validate and queue the job. Runs in a thread, because it reads files and waits for the database."""
    return _queued(parse(body, JobSpec), here, who, idempotency_key)


def _queued(spec: JobSpec, here: Context, who: Caller, idempotency_key: str | None) -> JobState:
    """Queue the job if it has no mistakes. One that was queued under this key before is not looked at again."""
    before = here.queue.repeated(spec, who, idempotency_key)
    if before is None:
        validate(spec, here.settings)
    job_id = before or here.queue.submit(spec, who, idempotency_key)
    if idempotency_key is None:
        return JobState(id=job_id, status=JobStatus.queued)
    with reading(here.engine) as session:  # it may be there since yesterday, or since this moment
        return JobState.of(jobs.get(session, job_id))


@router.post(
    ":validate",
    openapi_extra=body_of(JobSpec, EXAMPLE),
    responses=responses(InvalidJob, MalformedBody),
    dependencies=READS,
    summary="Look at a job without submitting it",
)
async def check(request: Request, here: InContext) -> JobCheck:
    """The job with all defaults filled in, which workers could serve it and why others cannot, and what it may take."""
    return await run_in_threadpool(_check, await request.body(), here)


def _check(body: bytes, here: Context) -> JobCheck:
    spec = parse(body, JobSpec)
    validate(spec, here.settings)
    with reading(here.engine) as session:
        return foresee(session, spec, now(session))


@router.get("", dependencies=READS, summary="List jobs")
def list_jobs(
    session: Reading,
    who: Called,
    status: Annotated[str | None, Query(description="One of " + ", ".join(JobStatus))] = None,
    label: Annotated[str | None, Query(description="key=value", examples=["team=nlp"])] = None,
    name: Annotated[str | None, Query(description="Part of the job's name, in any case", max_length=200)] = None,
    created_after: Annotated[
        float | None, Query(description=f"Jobs made after then: {TIME}", allow_inf_nan=False)
    ] = None,
    created_before: Annotated[
        float | None, Query(description=f"Jobs made before then: {TIME}", allow_inf_nan=False)
    ] = None,
    cursor: Annotated[str | None, Query(description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> JobPage:
    """Jobs, newest first, in pages: pass `next` on as `cursor` until it is null."""
    if status is not None and status not in set(JobStatus):
        raise BadQuery(f"status must be one of {', '.join(JobStatus)}, not {status!r}.")
    if label is not None and "=" not in label:
        raise BadQuery(f"label must be key=value, not {label!r}.")
    if cursor is not None and (not re.fullmatch("[0-9]{1,10}", cursor) or int(cursor) >= 2**31):
        raise BadQuery(f"cursor must be the `next` of a page before, not {cursor!r}.")
    key, _, value = (label or "").partition("=")
    wanted = jobs.Wanted(
        owner=who.sees,
        status=JobStatus(status) if status else None,
        label=(key, value) if label else None,
        name=name,
        created_after=created_after,
        created_before=created_before,
    )
    return jobs.page(session, wanted, int(cursor) if cursor else None, limit, now(session))


@router.get(
    "/{job_id}",
    response_model=JobView,
    responses=responses(NotFound),
    dependencies=READS,
    summary="One job",
)
async def show(
    job_id: str,
    request: Request,
    response: Response,
    here: InContext,
    who: Called,
    wait: Annotated[float, Query(ge=0, le=MOST_WAIT_SECONDS, description="Seconds to wait for news")] = 0.0,
    since: Annotated[int | None, Query(ge=0, lt=2**31, description="The `version` that is known already")] = None,
) -> JobView | Response:
    """Status, phase, progress, the best so far, the estimated finish, and why a queued job waits.

    With `wait` and `since`, the answer comes as soon as the job's `version` is greater than `since`, or after `wait`
    seconds. With `If-None-Match`, 304 when nothing but the clock has changed since the answer with that `ETag`.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + wait
    view = await run_in_threadpool(_look, job_id, here, who)
    while since is not None and view.version <= since and not view.status.ended and clock() < until:
        if here.watch.closed:
            break
        await here.watch.wait(job_id, since, until - clock())
        view = await run_in_threadpool(_look, job_id, here, who)
    tag = _tag(view)
    if _matches(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return view


def _look(job_id: str, here: Context, who: Caller) -> JobView:
    with reading(here.engine) as session:
        return jobs.view(session, jobs.get(session, job_id, who.sees), now(session))


def _matches(asked: str, tag: str) -> bool:
    """Whether If-None-Match names the tag, by the weak comparison (RFC 9110, 13.1.2)."""
    names = [one.strip().removeprefix("W/") for one in asked.split(",")]
    return "*" in names or tag.removeprefix("W/") in names


def _tag(view: JobView) -> str:
    """The weak entity tag of what a job's view says, apart from what only the clock changes (RFC 9110, 8.8.3)."""
    text = view.model_dump_json(exclude={"elapsed_seconds", "estimated_finish_at"})
    return f'W/"{hashlib.sha256(text.encode()).hexdigest()[:16]}"'


@router.post("/{job_id}/cancel", status_code=202, responses=ACTED, dependencies=SUBMITS, summary="Cancel")
def cancel(job_id: Existing, here: InContext) -> JobState:
    """End the job now; the device is free within seconds."""
    here.queue.cancel(job_id)
    return JobState(id=job_id, status=JobStatus.cancelled)


@router.post("/{job_id}/stop", status_code=202, responses=ACTED, dependencies=SUBMITS, summary="Stop")
def stop(job_id: Existing, here: InContext) -> JobState:
    """End the job now and recommend the best so far."""
    return JobState(id=job_id, status=JobStatus(here.queue.stop(job_id)))


@router.delete("/{job_id}", status_code=204, responses=ACTED, dependencies=SUBMITS, summary="Delete")
def delete(job_id: Existing, here: InContext) -> None:
    """Delete a job that has ended, with its trials, its events and its recommendation."""
    here.queue.delete(job_id)


@router.post(
    "/{job_id}/clone",
    status_code=202,
    openapi_extra={
        "requestBody": {"content": {"application/json": {"schema": {"type": "object"}, "example": CHANGES}}}
    },
    responses=responses(InvalidJob, MalformedBody, NotFound, KeyReused),
    dependencies=SUBMITS,
    summary="Submit a job again",
)
async def clone(
    job_id: Existing,
    request: Request,
    response: Response,
    here: InContext,
    who: Called,
    idempotency_key: Key = None,
) -> JobState:
    """Queue the same job again; the body, if there is one, is a JSON merge patch (RFC 7396) of its spec."""
    copy = await run_in_threadpool(_clone, await request.body(), job_id, here, who, idempotency_key)
    response.headers["Location"] = f"/v1/jobs/{copy.id}"
    return copy


def _clone(body: bytes, job_id: str, here: Context, who: Caller, idempotency_key: str | None) -> JobState:
    changes = read(body, "The body", "what changes in the job") if body.strip() else {}
    with reading(here.engine) as session:
        spec = dict(jobs.get(session, job_id, who.sees).spec)
    return _queued(well_formed(merged(spec, changes), JobSpec), here, who, idempotency_key)

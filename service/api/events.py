"""/v1/jobs/{id}/events: what happened to a job, as a list and as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent

from service import events, jobs
from service.access import Caller, is_valid
from service.api.access import ADMIN, READS, Called, Existing, Visible
from service.api.context import Context, InContext, Reading
from service.api.problems import responses
from service.contract.views import EventList, EventView
from service.db import reading
from service.errors import NotFound, TooMany

router = APIRouter(prefix="/v1/jobs/{job_id}/events", tags=["events"], dependencies=READS)

PAGE = 200
MOST_STREAMS = 100  # that one API key may have open
WAIT_SECONDS = 30.0  # until a stream looks again whether its job is still there
After = Annotated[int, Query(ge=0, lt=2**31, description="The `seq` of the last event that is known")]


@router.get("", responses=responses(NotFound), summary="A job's events")
def tail(
    job: Visible, session: Reading, after: After = 0, limit: Annotated[int, Query(ge=1, le=1000)] = PAGE
) -> EventList:
    """The job's events, oldest first; pass the last `seq` on as `after` to see what has happened since."""
    return EventList(items=events.tail(session, job.id, after, limit))


async def counted_stream(here: InContext, who: Called) -> AsyncIterator[None]:
    """Counts a stream as its key's for as long as it lasts; TooMany where the key has MOST_STREAMS."""
    if here.streams[who.id] >= MOST_STREAMS:
        raise TooMany(f"{MOST_STREAMS} streams are open already, which is the most for one API key; end one of them.")
    here.streams[who.id] += 1
    try:
        yield
    finally:
        here.streams[who.id] -= 1


@router.get(
    "/stream",
    dependencies=[Depends(counted_stream)],
    response_class=EventSourceResponse,
    responses=responses(NotFound),
    summary="Follow a job",
)
async def stream(
    job_id: Existing,
    here: InContext,
    who: Called,
    after: After = 0,
    last_event_id: Annotated[int | None, Header(ge=0, lt=2**31)] = None,
) -> AsyncIterable[ServerSentEvent]:
    """The job's events as Server-Sent Events, until the job has ended; `id` is the event's `seq`.

    A client that lost the connection goes on with `Last-Event-ID`, as browsers do by themselves. A stream ends when
    its job is deleted, its key is revoked, or the server ends.
    """
    seq = last_event_id if last_event_id is not None else after
    while not here.watch.closed:
        try:
            found, ended = await run_in_threadpool(_since, job_id, here, who, seq)
        except NotFound:
            return
        for event in found:
            yield ServerSentEvent(id=str(event.seq), event=event.kind, data=event)
            seq = event.seq
        if len(found) == PAGE:
            continue
        if ended:
            return
        await here.watch.wait(job_id, seq, WAIT_SECONDS)


def _since(job_id: str, here: Context, who: Caller, seq: int) -> tuple[tuple[EventView, ...], bool]:
    with reading(here.engine) as session:
        if who.id and who != ADMIN and not is_valid(session, who.id):
            return (), True
        job = jobs.get(session, job_id, who.sees)
        return events.tail(session, job.id, seq, PAGE), job.status.ended

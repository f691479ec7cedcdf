"""/v1/jobs/{id}/exports: the recommendation written for a trainer."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from service import jobs
from service.api.access import READS, Existing
from service.api.context import InContext
from service.api.problems import responses
from service.db import reading
from service.errors import NotFound, NotYet
from service.exports import EXPORTS

router = APIRouter(tags=["jobs"])


@router.get(
    "/v1/jobs/{job_id}/exports/{name}",
    response_class=PlainTextResponse,
    responses=responses(NotFound, NotYet),
    dependencies=READS,
    summary="The recommendation as a trainer's file",
)
def export(job_id: Existing, here: InContext, name: str) -> Response:
    """The recommendation as one of the exports, such as json, spec or train.py; 404 lists all of them."""
    if name not in EXPORTS:
        raise NotFound(f"There is no export {name!r}; there are: {', '.join(EXPORTS)}.")
    with reading(here.engine) as session:  # which ends before the file is written: a script takes seconds
        best = jobs.recommendation(jobs.get(session, job_id))
    return PlainTextResponse(EXPORTS[name].write(best))

"""Trials, exports, workers, levers, health."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from service import jobs
from service.api.context import InContext, Reading
from service.api.problems import responses
from service.catalogue import catalogue
from service.contract.views import Catalogue, Health, LoggedTrial, WorkerList
from service.db import check, now
from service.errors import NotFound, NotYet, Unavailable
from service.exports import EXPORTS

router = APIRouter()


@router.get("/v1/trials/{trial_id}", tags=["trials"], responses=responses(NotFound), summary="One trial")
def trial(trial_id: str, session: Reading) -> LoggedTrial:
    """One trial's measurement, with the end of what it printed."""
    return jobs.trial(session, trial_id)


@router.get(
    "/v1/jobs/{job_id}/exports/{name}",
    tags=["jobs"],
    response_class=PlainTextResponse,
    responses=responses(NotFound, NotYet),
    summary="The recommendation as a trainer's file",
)
def export(job_id: str, name: str, session: Reading) -> Response:
    """One of: json, spec, train.py."""
    if name not in EXPORTS:
        raise NotFound(f"There is no export {name!r}; there are: {', '.join(EXPORTS)}.")
    return PlainTextResponse(EXPORTS[name](jobs.must_recommend(session, jobs.get(session, job_id))))


@router.get("/v1/workers", tags=["workers"], summary="Workers")
def workers(session: Reading) -> WorkerList:
    """Every worker, its device, and whether it is alive."""
    return WorkerList(items=jobs.workers(session, now(session)))


@router.get("/v1/levers", tags=["levers"], summary="The catalogue")
def levers(session: Reading) -> Catalogue:
    """Every lever and choice, and for each worker whether it is available and why not."""
    return catalogue(jobs.workers(session, now(session)))


@router.get("/healthz", tags=["health"], summary="The process is alive")
def healthz() -> Health:
    """Always ok while the process answers."""
    return Health()


@router.get("/readyz", tags=["health"], responses=responses(Unavailable), summary="The database answers")
def readyz(here: InContext) -> Health:
    """ok when the database answers with the schema in place."""
    check(here.engine)
    return Health()

"""/v1/workers: who measures, and on what; and ending one in order."""

from __future__ import annotations

from fastapi import APIRouter

from service import jobs
from service.api.access import ADMINISTERS, READS
from service.api.context import InContext, Reading
from service.api.problems import responses
from service.contract.views import WorkerList
from service.db import now
from service.errors import NotFound

router = APIRouter(prefix="/v1/workers", tags=["workers"])


@router.get("", dependencies=READS, summary="Workers")
def workers(session: Reading) -> WorkerList:
    """Every worker, its device, and whether it is alive."""
    return WorkerList(items=jobs.workers(session, now(session)))


@router.post(
    "/{worker_id}/drain",
    status_code=204,
    dependencies=ADMINISTERS,
    responses=responses(NotFound),
    summary="End a worker in order",
)
def drain(worker_id: str, here: InContext) -> None:
    """Give the worker no further task: it finishes its present one, and ends."""
    here.queue.drain(worker_id)

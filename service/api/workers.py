"""/v1/workers: who measures, and on what."""

from __future__ import annotations

from fastapi import APIRouter

from service import jobs
from service.api.context import Reading
from service.contract.views import WorkerList
from service.db import now

router = APIRouter(tags=["workers"])


@router.get("/v1/workers", summary="Workers")
def workers(session: Reading) -> WorkerList:
    """Every worker, its device, and whether it is alive."""
    return WorkerList(items=jobs.workers(session, now(session)))

"""/v1/levers: everything that can be searched, and what each worker offers of it."""

from __future__ import annotations

from fastapi import APIRouter

from service import jobs
from service.api.access import READS
from service.api.context import Reading
from service.catalogue import catalogue
from service.contract.views import Catalogue
from service.db import now

router = APIRouter(tags=["levers"])


@router.get("/v1/levers", dependencies=READS, summary="The catalogue")
def levers(session: Reading) -> Catalogue:
    """Every lever and choice, and for each worker whether it is available and why not."""
    return catalogue(jobs.workers(session, now(session)))

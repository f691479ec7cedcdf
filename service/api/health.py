"""Probes for whoever runs the control plane: is the process alive, and does its database answer."""

from __future__ import annotations

from fastapi import APIRouter

from service.api.context import InContext
from service.api.problems import responses
from service.contract.views import Health
from service.db import check
from service.errors import Unavailable

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="The process is alive")
def healthz() -> Health:
    """Answers ok while the process lives."""
    return Health()


@router.get("/readyz", responses=responses(Unavailable), summary="The database answers")
def readyz(here: InContext) -> Health:
    """Answers ok when the database does and has its tables, else 503."""
    check(here.engine)
    return Health()

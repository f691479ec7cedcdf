"""Probes for whoever runs the control plane: is the process alive, and can it do its work."""

from __future__ import annotations

import asyncio
import shutil

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from service import jobs
from service.api.context import Context, InContext
from service.api.problems import responses
from service.contract.views import Health, Readiness
from service.db import check, now, reading
from service.errors import Unavailable

READY_SECONDS = 5.0
LEAST_FREE_BYTES = 64 << 20  # below it, SQLite's next writes may fail

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="The process is alive")
async def healthz() -> Health:
    """Answers ok while the process lives. Needs no thread, so it answers also while all threads wait."""
    return Health()


@router.get("/readyz", responses=responses(Unavailable), summary="Jobs can be queued")
async def readyz(here: InContext) -> Readiness:
    """Answers ok when the database answers, has its tables and room to grow, else 503; says how many workers live."""
    try:
        async with asyncio.timeout(READY_SECONDS):
            return await run_in_threadpool(_look, here)
    except TimeoutError:
        raise Unavailable(f"The database has not answered within {READY_SECONDS:.0f} s.") from None


def _look(here: Context) -> Readiness:
    check(here.engine)
    free = shutil.disk_usage(here.settings.home).free
    if here.engine.dialect.name == "sqlite" and free < LEAST_FREE_BYTES:
        raise Unavailable(f"The disk of {here.settings.home} is full: {free >> 20} MiB are left.")
    with reading(here.engine) as session:
        alive = jobs.workers_alive(session, now(session))
    note = None if alive else "No worker is alive, so jobs wait; `dynotune worker` starts one."
    return Readiness(workers_alive=alive, note=note)

"""The application: routes, errors, and a thread that reaps dead workers' tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from service import __version__
from service.api import estimates, exports, health, jobs, levers, problems, trials, workers
from service.api.context import Context
from service.db import connect
from service.queue import Queue
from service.settings import Settings

REAP_SECONDS = 5.0
MAX_BODY_BYTES = 1 << 20


def create_app(settings: Settings) -> FastAPI:
    """The API on the settings' database. The schema has to be there: `service.db.upgrade` makes it."""
    engine = connect(settings.database_url)
    queue = Queue(engine)

    async def reap() -> None:
        while True:
            await asyncio.sleep(REAP_SECONDS)
            with contextlib.suppress(SQLAlchemyError):  # the database is away: workers wait for it too
                await asyncio.to_thread(queue.reap)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(reap())
        yield
        task.cancel()
        engine.dispose()

    app = FastAPI(
        title="dynotune",
        version=__version__,
        lifespan=lifespan,
        description="Measures every finetuning speed-up and returns the fastest stable configuration.",
        separate_input_output_schemas=False,  # a job is described once, whether it is sent or answered
    )
    app.state.context = Context(settings, engine, queue)
    app.add_middleware(problems.LimitBody, limit=MAX_BODY_BYTES)
    problems.install(app)
    for module in (jobs, trials, exports, workers, levers, estimates, health):
        app.include_router(module.router)
    return app

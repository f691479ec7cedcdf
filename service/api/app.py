"""The FastAPI application: its routes, its error handlers, and a task that gives dead workers' tasks to others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI
from sqlalchemy.exc import SQLAlchemyError

from service import __version__
from service.api import estimates, exports, health, jobs, levers, problems, trials, workers
from service.api.bodies import HeadAsGet, LimitBody
from service.api.context import Context
from service.api.guard import Guard
from service.api.queries import known_parameters
from service.db import connect
from service.queue import Queue
from service.settings import Settings

REAP_SECONDS = 5.0
MAX_BODY_BYTES = 1 << 20


def create_app(settings: Settings, served_on: str = "127.0.0.1") -> FastAPI:
    """The API on the database of the settings, whose schema must exist already: `service.db.upgrade` creates it.

    `served_on` is the host that the server listens on: requests must name it, or one of DYNOTUNE_ALLOWED_HOSTS.
    """
    engine = connect(settings.database_url)
    queue = Queue(engine)

    async def reap() -> None:
        while True:
            await asyncio.sleep(REAP_SECONDS)
            with contextlib.suppress(
                SQLAlchemyError
            ):  # the database does not answer: try again at the next round, as workers do
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
        dependencies=[Depends(known_parameters)],
        description="Measures every finetuning speed-up and returns the fastest stable configuration.",
        separate_input_output_schemas=False,  # a job is described once, whether it is sent or answered
    )
    app.state.context = Context(settings, engine, queue)
    app.add_middleware(LimitBody, limit=MAX_BODY_BYTES)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, served_on=served_on, allowed=settings.allowed_hosts)  # added last, so asked first
    problems.install(app)
    for module in (jobs, trials, exports, workers, levers, estimates, health):
        app.include_router(module.router)
    return app

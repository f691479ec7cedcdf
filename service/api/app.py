"""The FastAPI application: its routes, its error handlers, and a task that gives dead workers' tasks to others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from starlette.middleware.gzip import GZipMiddleware

from service import __version__, logs, tracing
from service.api import (
    datasets,
    estimates,
    events,
    exports,
    health,
    internal,
    jobs,
    levers,
    metrics,
    problems,
    results,
    trials,
    webhooks,
    workers,
)
from service.api.bodies import HeadAsGet, LimitBody
from service.api.context import Context
from service.api.guard import Guard, is_loopback
from service.api.observing import Observed
from service.api.queries import known_parameters
from service.api.rates import rate_limit
from service.api.watching import EventWatch
from service.contract.internal import MOST_WORKER_BODY_BYTES
from service.db import connect
from service.metrics import Metrics
from service.patience import Patience
from service.queue import Queue
from service.settings import Settings
from service.text import first_line
from service.webhooks import Webhooks, signing_secret

log = logs.logger("dynotune.service")
REAP_SECONDS, PRUNE_SECONDS, SEND_SECONDS = 5.0, 600.0, 1.0
FIRST_SECONDS = 60.0  # until the first time of a rare chore, or a service that restarts often would never do it
LAST_SECONDS = 5.0  # for messages to webhooks, when the control plane ends
MAX_BODY_BYTES = 1 << 20
LEAST_ZIPPED_BYTES = 1000
Chore = tuple[float, Callable[[], Awaitable[object]]]  # seconds between two times, and what is done
# The modules whose routes ask for a key.
KEYED = (jobs, datasets, results, events, exports, trials, workers, levers, estimates, webhooks, metrics, internal)


def create_app(settings: Settings, served_on: str = "127.0.0.1", prunes_uploads: bool = False) -> FastAPI:
    """The API on the database of the settings, whose schema must exist already: `service.db.upgrade` creates it.

    `served_on` is the host that the server listens on: requests must name it, or one of DYNOTUNE_ALLOWED_HOSTS. Beyond
    the loopback address, every request needs an API key. `prunes_uploads`: delete the uploads that no job names. Only
    for a database that knows all jobs of its DYNOTUNE_HOME, which that of a single `dynotune tune` does not.
    """
    engine = connect(settings.database_url)
    queue, watch = Queue(engine), EventWatch(engine)
    key = settings.webhook_key.get_secret_value() if settings.webhook_key else None
    hooks = Webhooks(engine, lambda: signing_secret(key, settings.home), settings.webhook_private)
    asks_for_keys = settings.require_keys or not is_loopback(served_on)
    app = FastAPIOffline(
        title="dynotune",
        version=__version__,
        lifespan=_lifespan(lambda: _chores(settings, queue, hooks, prunes_uploads), hooks, watch, engine),
        dependencies=[Depends(known_parameters)],
        description="Measures every finetuning speed-up and returns the fastest stable configuration.",
        separate_input_output_schemas=False,  # a job is described once, whether it is sent or answered
        generate_unique_id_function=_operation_id,
    )
    app.state.context = Context(
        settings=settings,
        engine=engine,
        queue=queue,
        keys_required=asks_for_keys,
        rate_limit=rate_limit(settings.rate_limit),
        watch=watch,
        webhooks=hooks,
        metrics=Metrics(engine),
    )
    app.add_middleware(LimitBody, limit=MAX_BODY_BYTES, of_workers=MOST_WORKER_BODY_BYTES)
    app.add_middleware(GZipMiddleware, minimum_size=LEAST_ZIPPED_BYTES)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, served_on=served_on, allowed=settings.allowed_hosts, asks_for_keys=asks_for_keys)
    app.add_middleware(Observed)  # added last, so asked first
    problems.install(app)
    app.include_router(health.router)
    for module in KEYED:
        app.include_router(module.router)
    app.openapi = problems.described(app)  # type: ignore[method-assign]
    tracing.trace_requests(app)
    return app


def _chores(settings: Settings, queue: Queue, hooks: Webhooks, prunes_uploads: bool) -> list[Chore]:
    """What is done beside answering: looking for dead workers, forgetting what is old, sending messages."""
    patience = Patience()
    patience.begin()

    async def reap() -> None:
        patience.go_on()
        try:  # the database is asked meanwhile, or nobody would see that an outage goes on
            await asyncio.to_thread(queue.reap if patience.is_over() else queue.ask)
        except SQLAlchemyError:
            patience.begin()
            raise

    chores: list[Chore] = [
        (REAP_SECONDS, reap),
        (PRUNE_SECONDS, lambda: asyncio.to_thread(queue.prune, settings.keep_seconds)),
        (SEND_SECONDS, hooks.begin),
    ]
    if prunes_uploads:
        chores.append((PRUNE_SECONDS, lambda: asyncio.to_thread(queue.prune_uploads, settings.uploads)))
    return chores


def _lifespan(
    chores: Callable[[], list[Chore]], hooks: Webhooks, watch: EventWatch, engine: Engine
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    """FastAPI's context for the time in which the app serves; the chores are done meanwhile."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        over = asyncio.Event()
        tasks = [asyncio.create_task(_every(seconds, work, over)) for seconds, work in chores()]
        yield
        # Cancelling a task leaves its thread running, on a connection that is closed below: so tasks are waited for.
        over.set()
        _, hanging = await asyncio.wait(tasks, timeout=LAST_SECONDS)
        for task in hanging:
            task.cancel()
        # `dynotune tune` ends its control plane once the job has ended, of which webhooks are told first.
        with contextlib.suppress(TimeoutError, SQLAlchemyError):
            await asyncio.wait_for(hooks.send(), LAST_SECONDS)
        await watch.close()
        engine.dispose()

    return lifespan


async def _every(seconds: float, work: Callable[[], Awaitable[object]], over: asyncio.Event) -> None:
    """Do the work every so many seconds until `over`, also while the database is away and after a mistake of ours."""
    rest, is_away = min(seconds, FIRST_SECONDS), False
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), rest)
            return
        rest = seconds
        try:
            await work()
            if is_away:
                log.info("the database answers again")
            is_away = False
        except SQLAlchemyError as error:
            if not is_away:
                log.warning("the database does not answer", reason=first_line(error))
            is_away = True
        except Exception:  # noqa: BLE001 - the next round must come
            log.exception("a mistake of the service")


def _operation_id(route: APIRoute) -> str:
    """A route's name in the API's description, which stays the same for clients that are generated from it."""
    return "_".join([*map(str, route.tags[:1]), route.name])

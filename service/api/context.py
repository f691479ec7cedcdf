"""What routes depend on: the settings, the database engine and the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from service.api.rates import RateLimit
from service.api.watching import EventWatch
from service.db import POOL, reading
from service.metrics import Metrics
from service.queue import Queue
from service.settings import Settings
from service.webhooks import Webhooks


@dataclass(frozen=True)
class Context:
    """What one application shares among its requests."""

    settings: Settings
    engine: Engine
    queue: Queue
    keys_required: bool
    rate_limit: RateLimit
    watch: EventWatch
    webhooks: Webhooks
    metrics: Metrics
    streams: Counter[str] = field(default_factory=Counter)  # that are open, by the API key's id


async def context(request: Request) -> Context:
    """The context of the application that the request came to. Asynchronous, so that it needs no thread."""
    return cast(Context, request.app.state.context)


InContext = Annotated[Context, Depends(context)]


def read_only(here: InContext) -> Iterator[Session]:
    """A database session for one request that only reads: on SQLite it takes no write lock."""
    with reading(here.engine) as session:
        yield session


# A request with such a session holds a connection while it waits for a thread, and a thread may wait for a connection:
# where requests held all of them, each would wait for the other. So ten connections are left to code that takes and
# gives back one in a single thread. The session ends before the answer is sent, as a client may be slow to read it.
MOST_READING = sum(POOL.values()) - 10
Reading = Annotated[Session, Depends(read_only, scope="function", max_concurrency=MOST_READING)]

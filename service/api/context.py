"""What every route needs: settings, the database, the queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from service.db import readonly
from service.queue import Queue
from service.settings import Settings


@dataclass(frozen=True)
class Context:
    """The application's state."""

    settings: Settings
    engine: Engine
    queue: Queue


def context(request: Request) -> Context:
    """The application's state."""
    return cast(Context, request.app.state.context)


def reading(request: Request) -> Iterator[Session]:
    """A session that only reads."""
    with Session(readonly(context(request).engine)) as session, session.begin():
        yield session


InContext = Annotated[Context, Depends(context)]
Reading = Annotated[Session, Depends(reading)]

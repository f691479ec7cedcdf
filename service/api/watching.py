"""Waits for a job's next event: one query serves all who wait, however many they are."""

from __future__ import annotations

import asyncio

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.db import readonly
from service.models import Event

LOOK_SECONDS = 0.25  # between two looks at the database while anybody waits


class EventWatch:
    """Tells those who wait when there may be a new event.

    Events are written by workers too, which are other processes, so that the database is asked: by one task, which
    lives while somebody waits.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._latest = -1
        self._news = asyncio.Condition()
        self._waiting = 0
        self._task: asyncio.Task[None] | None = None

    async def wait(self, known: int, seconds: float) -> int:
        """The number of the last event of any job: as soon as it is greater than `known`, or after `seconds`."""
        self._waiting += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: self._latest > known)
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
        return self._latest

    async def _look(self) -> None:
        while self._waiting:
            try:
                latest = await run_in_threadpool(self._last)
            except SQLAlchemyError:  # the database is away: those who wait do so until their time is up
                latest = self._latest
            if latest != self._latest:
                async with self._news:
                    self._latest = latest
                    self._news.notify_all()
            await asyncio.sleep(LOOK_SECONDS)

    def _last(self) -> int:
        with Session(readonly(self._engine)) as session, session.begin():
            return session.scalar(select(func.max(Event.seq))) or 0

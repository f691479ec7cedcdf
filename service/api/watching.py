"""Waits for a job's next event: one query serves all who wait, however many they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from service.db import reading
from service.models import Event

LOOK_SECONDS = 0.25  # between two looks at the database while anybody waits
GONE = -1  # the last event of a job that has none any more, because it was deleted


class EventWatch:
    """Tells those who wait for a job that it has a new event.

    Events are written by workers too, which are other processes, so that the database is asked: by one task, which
    lives while somebody waits. Jobs are looked at one by one, because the numbers of different jobs' events do not
    always become visible in their order.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._latest: dict[str, int] = {}
        self._waiting: Counter[str] = Counter()
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    async def wait(self, job_id: str, known: int, seconds: float) -> None:
        """Return once the job has an event after `known`, or is gone, or after `seconds`, or when the watch closes."""
        self._waiting[job_id] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, seconds)), self._news:
                    await self._news.wait_for(lambda: self.closed or self._is_news(job_id, known))
        finally:
            self._waiting[job_id] -= 1
            if not self._waiting[job_id]:
                del self._waiting[job_id]
                self._latest.pop(job_id, None)

    async def close(self) -> None:
        """End all waiting, because the server is about to end, and return once the database is no longer asked."""
        self.closed = True
        async with self._news:
            self._news.notify_all()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _is_news(self, job_id: str, known: int) -> bool:
        last = self._latest.get(job_id)
        return last is not None and (last > known or last == GONE)

    async def _look(self) -> None:
        while self._waiting and not self.closed:
            asked = set(self._waiting)
            try:
                found = await run_in_threadpool(self._last, asked)
            except SQLAlchemyError:  # the database is away: those who wait do so until their time is up
                found = {}
            async with self._news:
                self._latest |= found
                self._news.notify_all()
            await asyncio.sleep(LOOK_SECONDS)

    def _last(self, job_ids: set[str]) -> dict[str, int]:
        query = (
            select(Event.job_id, func.max(Event.seq).label("last"))
            .where(Event.job_id.in_(job_ids))
            .group_by(Event.job_id)
        )
        with reading(self._engine) as session:
            there = {row.job_id: row.last for row in session.execute(query)}
        return dict.fromkeys(job_ids, GONE) | there

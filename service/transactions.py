"""Transactions of the control plane: short writes, and writes that are computed from what was read before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from service import history
from service.contract.task import LEASE_SECONDS
from service.db import now, reading
from service.history import JobHistory
from service.leases import job_of
from service.tuples import JobRow

RETRY_SECONDS = 1.0  # before a task is tried again after its first worker died
Made = TypeVar("Made")
Written = TypeVar("Written")


class Transactions:
    """Writes to the database, at the time of the database or, on SQLite, of an injected clock.

    `is_of_a_worker` is whether a worker's process writes, which may be of an older version than the control plane.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.time,
        lease_seconds: float = LEASE_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        is_of_a_worker: bool = False,
    ) -> None:
        self.engine = engine
        self._lease, self._retry = lease_seconds, retry_seconds
        self._clock, self._is_of_a_worker = clock, is_of_a_worker

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[Session, float]]:
        """A short write transaction, and the time. What is changed through objects is written at its end."""
        with Session(self.engine, autoflush=False) as session, session.begin():
            yield session, self.now(session)

    def now(self, session: Session) -> float:
        """Seconds since 1970: by PostgreSQL's clock, which machines share, or by the clock that was given."""
        return self._clock() if self.engine.dialect.name == "sqlite" else now(session)

    def conclude(
        self,
        job_id: str,
        make: Callable[[JobHistory], Made],
        write: Callable[[Session, float, JobRow, Made], Written],
    ) -> Written:
        """Read a job's history, compute from it outside of any transaction, then write.

        All of it is repeated when another task of the job has ended since the read. NotFound without such a job.
        """
        while True:
            with reading(self.engine) as session:
                known = history.load(session, job_id)
            made = make(known)
            with self.writing() as (session, now):
                job = job_of(session, job_id)
                if job.history_version == known.version:
                    return write(session, now, job, made)

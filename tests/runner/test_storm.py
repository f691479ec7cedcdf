"""Many trials, workers that are killed or stopped for longer than a lease, a database that crashes: no result is lost,
none counts twice.

40 trials of two jobs, 4 workers, 5 SIGKILLs and a SIGSTOP on each database, and 24 trials, 3 workers and a crash of
PostgreSQL; under `make chaos` 600 trials of thirty jobs, 6 workers, 20 SIGKILLs and 10 SIGSTOPs, and 120 trials and 3
crashes.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from service.contract.hardware import HardwareFacts
from service.db import connect, reading, upgrade
from service.models import Event, Job, Task, Worker
from service.queue import Queue
from tests import postgres
from tests.commands import Started
from tests.processes import none_left, start_worker, until

LONG = os.environ.get("DYNOTUNE_CHAOS") == "1"
TRIALS, WORKERS, KILLS, STOPS = (600, 6, 20, 10) if LONG else (40, 4, 5, 1)
MOST_TRIALS = 20  # of a job; some searches of 40 end after 33, as nothing is left to expect
LEASE_SECONDS = 3.0


def finished(engine: Engine) -> int:
    with reading(engine) as session:
        return session.scalar(select(func.count()).where(Task.kind == "trial", Task.state == "done")) or 0


def present(engine: Engine) -> set[int]:
    with reading(engine) as session:
        return set(session.scalars(select(Worker.pid)))


def deaths(engine: Engine) -> int:
    with reading(engine) as session:
        return session.scalar(select(func.count()).where(Event.kind == "worker-died")) or 0


def fall_silent(engine: Engine, worker: Started) -> None:
    """Stop a worker until its task is given to another, or for two leases if it has none; then let it go on.

    On SQLite a worker may be stopped in the middle of a write, and nobody else can write until it goes on. So what is
    asked meanwhile must not take the write lock: it would wait for the very worker that waits for this function.
    """
    before, began = deaths(engine), time.monotonic()
    worker.send_signal(signal.SIGSTOP)
    until(lambda: deaths(engine) > before or time.monotonic() - began > 2 * LEASE_SECONDS, 60, "a lost lease")
    worker.send_signal(signal.SIGCONT)


class Storm:
    """Jobs of so many trials, with workers on a device each, and what happens to them at which count of trials."""

    def __init__(self, queue: Queue, url: str, folder: Path, devices: list[HardwareFacts]) -> None:
        self.engine, self._url, self._folder, self._devices = queue.engine, url, folder, devices
        self.workers = [self._started(device) for device in devices]

    def _started(self, device: HardwareFacts) -> Started:
        return start_worker(self._folder, self._url, device, "quick", LEASE_SECONDS)

    def kill(self, victim: int) -> None:
        """Kill a worker, and start another on its device."""
        self.workers[victim].send_signal(signal.SIGKILL)
        self.workers[victim].wait()
        self.workers[victim] = self._started(self._devices[victim])

    def run(self, happens: dict[int, Callable[[], None]]) -> None:
        """Let things happen in their order, wait for the end of all jobs, and end the workers in order."""
        try:
            for moment, what in happens.items():
                until(lambda moment=moment: finished(self.engine) >= moment, 240, f"{moment} trials")  # type: ignore[misc]
                what()
            until(self._ended, 600 if LONG else 240, "the end of all jobs")
            # A worker that has only just been started is told to end once it has a loop that can be told.
            until(lambda: {worker.pid for worker in self.workers} <= present(self.engine), 60, "all workers")
            for worker in self.workers:
                worker.send_signal(signal.SIGTERM)
            assert [worker.wait(30) for worker in self.workers] == [0] * len(self.workers)
        finally:
            for worker in self.workers:
                worker.kill()
                worker.wait()
        none_left(self._folder)

    def _ended(self) -> bool:
        with reading(self.engine) as session:
            return all(status.ended for status in session.scalars(select(Job.status)))

    def check(self, trials: int) -> None:
        """Every trial has one result."""
        with reading(self.engine) as session:
            jobs = session.scalars(select(Job)).all()
            tasks = session.scalars(select(Task).where(Task.kind == "trial")).all()
            told = session.scalars(select(Event.data).where(Event.kind == "trial")).all()
            assert {(job.status, job.error) for job in jobs} == {("succeeded", None)}
            assert len(tasks) == trials and {task.outcome for task in tasks} == {"ok"}
            assert len({(task.job_id, task.key) for task in tasks}) == trials
            assert len({(task.job_id, task.finish_order) for task in tasks}) == trials
            assert len(told) == trials and len({one["task"] for one in told}) == trials


@pytest.mark.long
@pytest.mark.timeout(1800 if LONG else 600)
def test_no_result_is_lost_or_counted_twice(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    rng = random.Random(0)
    moments = sorted(rng.sample(range(5, TRIALS - 5), KILLS + STOPS))
    stops = set(rng.sample(moments, STOPS))
    devices = [facts(index=number, bf16_native=True) for number in range(WORKERS)]
    for _ in range(TRIALS // MOST_TRIALS):
        search = {"trials": MOST_TRIALS, "minutes": 1000, "verify": "quick", "reuse": False}
        queue.submit(spec(search=search))
    storm = Storm(queue, database_url, tmp_path, devices)
    happens: dict[int, Callable[[], None]] = {}
    for moment in moments:
        victim = rng.randrange(WORKERS)
        if moment in stops:
            happens[moment] = lambda victim=victim: fall_silent(engine, storm.workers[victim])  # type: ignore[misc]
        else:
            happens[moment] = partial(storm.kill, victim)
    storm.run(happens)
    storm.check(TRIALS)
    with reading(engine) as session:
        left = session.scalars(select(Worker).where(Worker.state != "idle")).all()
    assert len(left) <= KILLS  # killed workers cannot say that they left


@pytest.mark.timeout(1800 if LONG else 600)
def test_a_database_that_crashes_loses_nothing(
    tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    """A process of the server is killed, so that it ends all connections and recovers from its log."""
    trials, crashes = (120, 3) if LONG else (24, 1)
    server = postgres.start(tmp_path / "server", synchronous_commit="on")
    try:
        url = server.url("postgres")
        upgrade(url)
        queue = Queue(connect(url), retry_seconds=0.0)
        queue.submit(spec(search={"trials": trials, "minutes": 1000, "verify": "quick"}))
        storm = Storm(queue, url, tmp_path, [facts(index=number, bf16_native=True) for number in range(3)])
        storm.run({(number + 1) * trials // (crashes + 1): server.crash for number in range(crashes)})
        storm.check(trials)
        queue.engine.dispose()
    finally:
        server.stop()

"""Many trials, workers that are killed or stopped for longer than a lease: no result is lost, none counts twice.

60 trials, 4 workers, 5 SIGKILLs and a SIGSTOP on each database; under `make chaos` 600 trials, 6 workers, 20 SIGKILLs
and 10 SIGSTOPs.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from service.models import Event, Job, Task, Worker
from service.queue import Queue
from tests.processes import ours, start_worker, until

LONG = os.environ.get("DYNOTUNE_CHAOS") == "1"
TRIALS, WORKERS, KILLS, STOPS = (600, 6, 20, 10) if LONG else (60, 4, 5, 1)
LEASE_SECONDS = 3.0


def finished(engine: Engine) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).where(Task.kind == "trial", Task.state == "done")) or 0


def present(engine: Engine) -> set[int]:
    with Session(engine) as session:
        return set(session.scalars(select(Worker.pid)))


def deaths(engine: Engine) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).where(Event.kind == "worker-died")) or 0


def fall_silent(engine: Engine, worker: subprocess.Popen[bytes]) -> None:
    """Stop a worker until its task is given to another, or for two leases if it has none; then let it go on."""
    before, began = deaths(engine), time.monotonic()
    worker.send_signal(signal.SIGSTOP)
    until(lambda: deaths(engine) > before or time.monotonic() - began > 2 * LEASE_SECONDS, 60, "a lost lease")
    worker.send_signal(signal.SIGCONT)


@pytest.mark.timeout(1800 if LONG else 300)
def test_no_result_is_lost_or_counted_twice(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    rng = random.Random(0)
    moments = sorted(rng.sample(range(5, TRIALS - 5), KILLS + STOPS))
    stops = set(rng.sample(moments, STOPS))
    devices = [facts(index=number, bf16_native=True) for number in range(WORKERS)]
    job_id = queue.submit(spec(search={"trials": TRIALS, "minutes": 1000, "verify": "quick"}))
    workers = [start_worker(tmp_path, database_url, device, "quick", LEASE_SECONDS) for device in devices]
    try:
        for moment in moments:
            until(lambda moment=moment: finished(engine) >= moment, 120, f"{moment} trials")  # type: ignore[misc]
            victim = rng.randrange(WORKERS)
            if moment in stops:
                fall_silent(engine, workers[victim])
                continue
            workers[victim].send_signal(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = start_worker(tmp_path, database_url, devices[victim], "quick", LEASE_SECONDS)

        def ended() -> bool:
            with Session(engine) as session:
                return session.scalars(select(Job.status)).one() not in ("queued", "running")

        until(ended, 600 if LONG else 180, "the end of the job")
        # A worker that has only just been started is told to end once it has a loop that can be told.
        until(lambda: {worker.pid for worker in workers} <= present(engine), 60, "all workers")
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        assert [worker.wait(30) for worker in workers] == [0] * WORKERS
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    with Session(engine) as session:
        job = session.scalars(select(Job)).one()
        tasks = session.scalars(select(Task).where(Task.kind == "trial")).all()
        told = session.scalars(select(Event.data).where(Event.kind == "trial")).all()
        left = session.scalars(select(Worker).where(Worker.state != "idle")).all()
    assert job.id == job_id and job.status == "succeeded", job.error
    assert len(tasks) == TRIALS and {task.outcome for task in tasks} == {"ok"}
    assert len({task.key for task in tasks}) == len({task.finish_order for task in tasks}) == TRIALS
    assert len(told) == TRIALS and len({one["task"] for one in told}) == TRIALS
    assert len(left) <= KILLS  # killed workers cannot say that they left
    assert ours(tmp_path) == []

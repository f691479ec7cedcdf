"""60 trials, four workers and five SIGKILLs at random moments on each database: 60 results, none twice."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from service.models import Event, Job, Task, Worker
from service.queue import Queue
from tests.processes import start_worker, until

TRIALS, WORKERS, KILLS = 60, 4, 5


def finished(engine: Engine) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).where(Task.kind == "trial", Task.state == "done")) or 0


def test_no_result_is_lost_or_counted_twice(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    rng = random.Random(0)
    moments = sorted(rng.sample(range(5, TRIALS - 5), KILLS))
    devices = [facts(index=number, bf16_native=True) for number in range(WORKERS)]
    job_id = queue.submit(spec(search={"trials": TRIALS, "minutes": 1000, "verify": "quick"}))
    workers = [start_worker(tmp_path, database_url, device, "quick") for device in devices]
    try:
        for moment in moments:
            until(lambda moment=moment: finished(engine) >= moment, 120, f"{moment} trials")  # type: ignore[misc]
            victim = rng.randrange(WORKERS)
            workers[victim].send_signal(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = start_worker(tmp_path, database_url, devices[victim], "quick")

        def ended() -> bool:
            with Session(engine) as session:
                return session.scalars(select(Job.status)).one() not in ("queued", "running")

        until(ended, 180, "the end of the job")
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
    assert not [one for one in psutil.process_iter(["environ"]) if _ours(one, database_url)]


def _ours(process: psutil.Process, url: str) -> bool:
    """Whether a process is one of this test's workers, fork servers or children: they inherit the URL."""
    return (process.info["environ"] or {}).get("DYNOTUNE_DATABASE_URL") == url

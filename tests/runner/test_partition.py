"""The network between a worker and the database is cut: another worker goes on, nothing is lost or counted twice."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from service.models import Event, Job, Task
from service.queue import Queue
from tests.partition import Partition
from tests.processes import none_left, start_worker, until

TRIALS = 12
LEASE_SECONDS = 4.0


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_worker_behind_a_cut_network_loses_its_task_and_nothing_else(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    """Another worker takes over and ends the job; once the network is mended, the first one finds its lease lost."""
    network = Partition(database_url)
    queue.submit(spec(search={"trials": TRIALS, "minutes": 1000, "verify": "quick"}))

    def found(query: Any) -> list[Any]:
        with Session(engine) as session:
            return list(session.scalars(query))

    far = start_worker(tmp_path, network.url, facts(index=0, bf16_native=True), "hang", LEASE_SECONDS)
    near = None
    try:
        until(lambda: bool(found(select(Task.id).where(Task.progress.is_not(None)))), 60, "a trial of the far worker")
        network.cut()
        near = start_worker(tmp_path, database_url, facts(index=1, bf16_native=True), "quick", LEASE_SECONDS)
        until(lambda: bool(found(select(Event.seq).where(Event.kind == "worker-died"))), 60, "the lost lease")
        far.send_signal(signal.SIGTERM)  # or it would claim the next trial, which hangs as well
        until(lambda: found(select(Job.status)) == ["succeeded"], 60, "the end of the job")
        network.mend()
    finally:
        workers = [worker for worker in (far, near) if worker is not None]
        for worker in workers[1:]:
            worker.send_signal(signal.SIGTERM)
        network.mend()
        codes = [worker.wait(60) for worker in workers]
        network.end()
    assert codes == [0, 0]
    none_left(tmp_path)
    outcomes = found(select(Task.outcome).where(Task.kind == "trial"))
    told = [event["task"] for event in found(select(Event.data).where(Event.kind == "trial"))]
    assert outcomes == ["ok"] * TRIALS and sorted(told) == sorted(found(select(Task.id).where(Task.kind == "trial")))

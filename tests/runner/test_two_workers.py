"""Two workers, one job, one device: both contribute, never at once; and a worker that is told to go, goes in order."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from service import access, jobs
from service.access import Scope
from service.cli.embedded import control_plane
from service.models import Job, Task, Worker
from service.queue import Queue
from service.settings import Settings
from tests.processes import start_worker, until


def status(engine: Engine) -> str:
    with Session(engine) as session:
        return session.scalars(select(Job.status)).one()


def trials(engine: Engine, state: str) -> list[Task]:
    with Session(engine) as session:
        return list(session.scalars(select(Task).where(Task.kind == "trial", Task.state == state)))


def present(engine: Engine) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).select_from(Worker)) or 0


def test_both_contribute_and_never_at_once(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    (tmp_path / "locks").mkdir()
    workers = [start_worker(tmp_path, database_url, facts(), "exclusive") for _ in range(2)]
    try:
        until(lambda: present(engine) == 2, 60, "both workers")
        queue.submit(spec(search={"trials": 24, "minutes": 100, "verify": "quick"}))
        until(lambda: status(engine) not in ("queued", "running"), 120, "the end of the job")
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(30) for worker in workers]
    assert codes == [0, 0] and status(engine) == "succeeded"
    assert not (tmp_path / "locks" / "overlaps").read_text()
    with Session(engine) as session:
        done = jobs.trials(session, session.scalars(select(Job)).one())
        assert len({trial.worker_id for trial in done}) == 2
        best = session.scalars(select(Job)).one().recommendation
    assert best and best["final"] and best["stability"]["stable"]


def test_cancel_frees_the_device_and_the_worker_goes_on(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    first = queue.submit(spec())
    worker = start_worker(tmp_path, database_url, facts(), "hang")
    try:
        until(lambda: any(task.progress for task in trials(engine, "running")), 60, "a running trial")
        queue.cancel(first)
        until(lambda: not trials(engine, "running"), 20, "the end of the cancelled trial")
        second = queue.submit(spec())
        until(lambda: any(task.job_id == second for task in trials(engine, "running")), 20, "the next job's trial")
        assert queue.stop(second) == "failed"  # nothing had succeeded
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0


def test_what_a_running_trial_prints_is_seen(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    """From the worker through the control plane to `dynotune trials --log --follow`, which ends with the trial."""
    job = queue.submit(spec())

    def log() -> str:
        with Session(engine) as session:
            return session.scalar(select(Task.log).where(Task.kind == "trial", Task.state == "running")) or ""

    with control_plane(Settings(home=tmp_path / "plane", database_url=database_url)) as url:
        worker = start_worker(tmp_path, url, facts(), "talking")
        try:
            until(lambda: "line 0" in log(), 60, "the first line")
            follow = [sys.executable, "-m", "service.cli", "trials", job, "--log", "1", "--follow", "--url", url]
            reader = subprocess.Popen(follow, stdout=subprocess.PIPE, text=True)
            assert reader.stdout is not None and reader.stdout.readline() == "line 0\n"
            (tmp_path / "locks" / "say-1").touch()
            assert reader.stdout.readline() == "line 1\n"
            queue.cancel(job)
            assert reader.wait(30) == 0 and reader.stdout.read().strip() == ""
            reader.stdout.close()
        finally:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(30) == 0


def test_a_second_sigterm_hands_the_trial_back(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    queue.submit(spec())
    worker = start_worker(tmp_path, database_url, facts(), "hang")
    until(lambda: any(task.progress for task in trials(engine, "running")), 60, "a running trial")
    children = psutil.Process(worker.pid).children(recursive=True)
    assert children and not any("DYNOTUNE_DATABASE_URL" in child.environ() for child in children)
    worker.send_signal(signal.SIGTERM)  # lets the trial end ...
    worker.send_signal(signal.SIGINT)  # ... this hands it back
    assert worker.wait(30) == 0
    (task,) = trials(engine, "queued")
    assert task.deaths == 0 and task.worker_id is None


def test_a_worker_with_too_little_disk_plans_but_leaves_trials_to_others(
    queue: Queue,
    engine: Engine,
    database_url: str,
    tmp_path: Path,
    facts: Callable[..., Any],
    spec: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYNOTUNE_MIN_FREE_DISK_GIB", "1000000")
    queue.submit(spec())
    worker = start_worker(tmp_path, database_url, facts(), "quick")
    until(lambda: bool(trials(engine, "queued")), 60, "a planned trial")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    (task,) = trials(engine, "queued")
    assert task.attempt == 0 and task.worker_id is None and status(engine) == "running"


def test_workers_that_know_no_database(
    queue: Queue, engine: Engine, database_url: str, tmp_path: Path, facts: Callable[..., Any], spec: Callable[..., Any]
) -> None:
    """A job over HTTP from its plan to its answer: with a key, by two workers, of which one is told to drain."""
    settings = Settings(home=tmp_path / "plane", database_url=database_url, require_keys=True)
    key = access.create(engine, "cluster", [Scope.worker])
    weak = access.create(engine, "someone", [Scope.read])
    with control_plane(settings) as url:
        refused = start_worker(tmp_path, url, facts(), "instant", key=weak)
        assert refused.wait(30) == 2
        assert "scope worker; yours has read" in (tmp_path / "workers.log").read_text()
        workers = [start_worker(tmp_path, url, facts(), "exclusive", key=key) for _ in range(2)]
        try:
            until(lambda: present(engine) == 2, 60, "both workers")
            queue.submit(spec(search={"trials": 12, "minutes": 100, "verify": "quick"}))
            until(lambda: bool(trials(engine, "done")), 60, "a trial")
            with Session(engine) as session:
                first = session.scalars(select(Worker.id)).first()
            queue.drain(first or "")
            until(lambda: present(engine) == 1, 60, "the end of the worker that was told to drain")
            until(lambda: status(engine) not in ("queued", "running"), 120, "the end of the job")
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            codes = [worker.wait(30) for worker in workers]
    assert codes == [0, 0] and status(engine) == "succeeded"
    with Session(engine) as session:
        assert all(task.deaths == 0 for task in session.scalars(select(Task)))

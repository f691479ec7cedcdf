"""The whole way with real trials on a tiny model: an answer, a script that trains, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from service import jobs
from service.contract.recommendation import Recommendation
from service.db import connect
from service.models import Task
from service.queue import Queue
from tests import tiny
from tests.commands import Started
from tests.conftest import ROOT
from tests.processes import none_left, ours, start_worker, until
from worker.runner.lock import DeviceLock


def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "DYNOTUNE_HOME": str(tmp_path / "home")}


def children(worker: Started) -> list[psutil.Process]:
    """The trials' processes: those that the worker's fork server started."""
    return [trial for server in psutil.Process(worker.pid).children() for trial in server.children()]


def cpu_seconds(process: psutil.Process) -> float:
    """What it has computed so far; 0 once it is gone."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


@pytest.mark.long
def test_tune_ends_with_an_answer_that_trains(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(tiny.job(tmp_path, method=["lora", "full", "qlora"])))
    command = [sys.executable, "-m", "service.cli", "tune", "job.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    best = Recommendation.model_validate_json((tmp_path / "dynotune-out" / "recommendation.json").read_text())
    assert best.final and best.weights.startswith("random") and "random" in done.stdout
    assert best.evidence.measurement.probes and best.dataset and best.dataset.rows == 190
    assert "tokens/s" in done.stdout and "speed-up" in done.stdout and "trial 1" in done.stdout
    train = [sys.executable, "-W", "ignore", "dynotune-out/train.py", "--max-steps", "2", "--output", "model"]
    trained = subprocess.run(train, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert list((tmp_path / "model").glob("*.safetensors"))
    none_left(tmp_path)


def test_when_nothing_fits_the_job_says_so(tmp_path: Path) -> None:
    body = tiny.job(tmp_path, hardware={"memory_gib": 0.25}, search={"minutes": 1, "trials": 2, "verify": "quick"})
    (tmp_path / "job.json").write_text(json.dumps(body))
    command = [sys.executable, "-m", "service.cli", "tune", "job.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout
    assert "Every configuration ran out of memory" in done.stderr and "would help" in done.stderr


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A test run in the background of a shell ignores SIGINT, and so would what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_leaves_the_best_so_far_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(tiny.job(tmp_path, search={"minutes": 10, "trials": 500})))
    command = [sys.executable, "-m", "service.cli", "tune", "job.json"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "trial 1" in line and "ok" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    process.stdout.close()
    assert process.wait(60) == 130, rest
    assert "stopped with its best so far" in rest and "Traceback" not in rest
    assert (tmp_path / "dynotune-out" / "recommendation.json").exists()
    none_left(tmp_path)


@pytest.mark.long
def test_a_killed_worker_leaves_no_process_and_a_free_device(tmp_path: Path, facts: Callable[..., Any]) -> None:
    """SIGKILL in the middle of a real trial; another worker then finishes the job, and the next job, whose mistake only
    a trial can see, fails with its sentence."""
    from service.contract.job import JobSpec
    from service.db import upgrade

    url = f"sqlite:///{tmp_path / 'kill.db'}"
    upgrade(url)
    engine = connect(url)
    queue = Queue(engine)
    search = {"minutes": 2, "trials": 2, "verify": "quick"}
    first = queue.submit(JobSpec.model_validate(tiny.job(tmp_path, search=search)))

    def under_way() -> bool:
        with Session(engine) as session:
            claimed = session.scalars(select(Task).where(Task.kind == "trial", Task.state == "running")).first()
        return claimed is not None and any(cpu_seconds(one) > 0.5 for one in children(worker))

    here = facts(versions={"torch": "x"})
    worker = start_worker(tmp_path, url, here)
    until(under_way, 120, "a trial under way")
    assert ours(tmp_path)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    none_left(tmp_path)
    lock = DeviceLock(tmp_path / "locks", here.lock_name)
    assert lock.acquire()
    lock.release()
    second = start_worker(tmp_path, url, here)
    try:

        def done() -> bool:
            with Session(engine) as session:
                trials = session.scalars(select(Task).where(Task.kind == "trial")).all()
            return len(trials) == 2 and all(trial.outcome == "ok" for trial in trials)

        until(done, 120, "both trials")
        queue.cancel(first)  # its verification has tests of its own
        (tmp_path / "next").mkdir()
        mistaken = tiny.job(tmp_path / "next", lora={"target_modules": ["no_such_module"]})
        failing = queue.submit(JobSpec.model_validate(mistaken))

        def failed() -> bool:
            with Session(engine) as session:
                job = jobs.get(session, failing)
            return job.status == "failed" and "lora.target_modules" in (job.error or "")

        until(failed, 120, "the sentence about the mistake")
    finally:
        second.send_signal(signal.SIGINT)
        second.wait(30)
        engine.dispose()

"""`dynotune launch slurm` on a real Slurm: an array of real workers does a job, and Slurm may end them at any time.

Only the trials' own processes are stand-ins (tests/stubs.py), as in the tests of the worker.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from service.models import Job, Task
from service.queue import Queue
from tests import slurm
from tests.conftest import ROOT
from tests.processes import until

lacking = slurm.missing()
pytestmark = [
    pytest.mark.skipif(
        bool(lacking),
        reason=f"Slurm is not installed here ({', '.join(lacking)} missing); on Debian: "
        "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge",
    ),
    pytest.mark.parametrize("database_url", ["sqlite"], indirect=True),
]
# In place of the installed program: the worker's own command line, with a stand-in for its device and its trials.
PROGRAM = """\
#!/bin/bash
shift
echo "$SLURM_ARRAY_TASK_ID $CUDA_VISIBLE_DEVICES $*" >> {folder}/started
exec {python} -m worker "$@" --facts {folder}/facts-$SLURM_ARRAY_TASK_ID.json --entry tests.stubs:{entry} --lease 3
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    """A Slurm of one node with two GPUs."""
    with slurm.running() as made:
        yield made


@pytest.fixture
def launch(
    cluster: slurm.Slurm, database_url: str, tmp_path: Path, facts: Callable[..., Any]
) -> Iterator[Callable[..., str]]:
    """Launches workers whose trials do as the stand-in `entry`; the id of the array."""

    def go(entry: str, *options: str) -> str:
        programs = tmp_path / "bin"
        programs.mkdir()
        program = programs / "dynotune"
        folder, python = shlex.quote(str(tmp_path)), shlex.quote(sys.executable)
        program.write_text(PROGRAM.format(folder=folder, python=python, entry=entry))
        program.chmod(0o755)
        for number in range(2):
            (tmp_path / f"facts-{number}.json").write_text(facts(index=number).model_dump_json())
        secrets = tmp_path / "database.env"
        secrets.write_text(f"DYNOTUNE_DATABASE_URL={shlex.quote(database_url)}\n")
        secrets.chmod(0o600)
        command = [sys.executable, "-m", "service.cli", "launch", "slurm", "--submit", *options]
        command += ["--environment-file", str(secrets), "--env", "DYNOTUNE_DATA_ROOTS=/"]
        command += ["--setup", f"export PATH={shlex.quote(str(programs))}:$PATH"]
        around = os.environ | cluster.environment | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=around, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith("Submitted batch job "), done.stderr
        return done.stdout.split()[-1]

    yield go
    cluster.clear()


def trials(engine: Engine) -> list[Task]:
    with Session(engine) as session:
        return list(session.scalars(select(Task).where(Task.kind == "trial")))


def said(folder: Path) -> str:
    """What the array's tasks printed."""
    return "\n".join(file.read_text() for file in folder.glob("slurm-*.out"))


def ending(cluster: slurm.Slurm, task: str) -> str:
    """How an array's task ended: its state and exit code, as Slurm says them."""
    shown = dict(word.split("=", 1) for word in cluster.run("scontrol", "show", "job", task).split() if "=" in word)
    return f"{shown['JobState']} {shown['ExitCode']}"


def test_an_array_does_a_job_and_ends(
    launch: Callable[..., str],
    cluster: slurm.Slurm,
    queue: Queue,
    engine: Engine,
    tmp_path: Path,
    spec: Callable[..., Any],
) -> None:
    queue.submit(spec(search={"trials": 8, "minutes": 100, "verify": "quick"}))
    array = launch("quick", "--workers", "2", "--gpus", "1", "--time", "1h", "--idle", "0.05", "--cpus", "1")
    until(lambda: not cluster.states(), 120, "the end of both workers")
    with Session(engine) as session:
        assert session.scalars(select(Job.status)).one() == "succeeded", said(tmp_path)
    assert {task.state for task in trials(engine)} == {"done"}
    assert [ending(cluster, f"{array}_{number}") for number in range(2)] == ["COMPLETED 0:0"] * 2, said(tmp_path)
    assert said(tmp_path).count("it had no task for 0.05 min") == 2
    started = [line.split(maxsplit=2) for line in (tmp_path / "started").read_text().splitlines()]
    assert {number for number, *_ in started} == {gpu for _, gpu, _ in started} == {"0", "1"}, "a GPU each"
    assert {options for *_, options in started} == {"--devices all --exit-when-idle 0.05 --grace 15 --until 3510s"}


@pytest.mark.parametrize("how", ["scancel", "requeue", "signal"])
def test_slurm_may_end_a_worker(
    launch: Callable[..., str],
    cluster: slurm.Slurm,
    queue: Queue,
    engine: Engine,
    tmp_path: Path,
    spec: Callable[..., Any],
    how: str,
) -> None:
    queue.submit(spec())
    array = launch("hang", "--workers", "1", "--grace", "0")
    until(lambda: any(task.progress for task in trials(engine)), 60, "a running trial")
    (before,) = trials(engine)
    if how == "scancel":
        cluster.run("scancel", array)
    elif how == "requeue":
        cluster.run("scontrol", "requeue", f"{array}_0")
    else:  # what --signal has Slurm send before the time limit
        cluster.run("scancel", "--batch", "--signal", signal.Signals.SIGTERM.name, f"{array}_0")
    until(
        lambda: trials(engine)[0].state == "queued" or trials(engine)[0].attempt > before.attempt, 30, "the trial back"
    )
    (after,) = trials(engine)
    assert after.deaths == 0 and after.outcome is None, said(tmp_path)
    if how == "signal":
        until(lambda: not cluster.states(), 30, "the worker's end")
        assert ending(cluster, f"{array}_0") == "FAILED 143:0"
    if how == "requeue":
        starts = tmp_path / "started"
        until(lambda: cluster.states() == ["PENDING"], 30, "the task's return to the queue")
        cluster.run("scontrol", "update", f"JobId={array}_0", "StartTime=now")  # Slurm would wait for two minutes
        until(lambda: len(starts.read_text().splitlines()) == 2, 60, "another start of the same task")
        until(lambda: trials(engine)[0].attempt > before.attempt, 60, "the trial's second attempt")

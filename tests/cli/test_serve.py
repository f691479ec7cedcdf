"""`dynotune serve` and its local worker: one that died is started again, one that cannot live is given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from service.client import Client, Unreachable
from service.contract.hardware import HardwareFacts
from service.worker_command import WORKER
from tests.conftest import ROOT
from tests.processes import free_port, until


def serve(folder: Path, port: int, *worker: str) -> subprocess.Popen[bytes]:
    """`dynotune serve` with another command for its worker, and no pause before it starts another."""
    code = f"""
import sys
from service import deaths
from service.cli import embedded, main
embedded.WORKER, deaths.FIRST_PAUSE_SECONDS = {(sys.executable, *worker)}, 0.0
sys.argv = ["dynotune", "serve", "--port", "{port}"]
main()
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DYNOTUNE_DATA_ROOTS": str(folder)}
    output = (folder / "output").open("w")
    with output:
        return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment, stderr=output)


def test_a_worker_that_was_killed_is_started_again(tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    (tmp_path / "facts.json").write_text(facts().model_dump_json())
    port = free_port()
    process = serve(tmp_path, port, "-m", "worker", "--facts", "facts.json")

    def workers() -> set[int]:
        try:
            with Client(f"http://127.0.0.1:{port}") as client:
                return {worker.pid for worker in client.workers()}
        except Unreachable:
            return set()

    try:
        until(lambda: len(workers()) == 1, 60, "the first worker")
        (first,) = workers()
        os.kill(first, signal.SIGKILL)
        until(lambda: len(workers()) == 2, 60, "the second worker")
    finally:
        process.terminate()
        code = process.wait(30)
    said = (tmp_path / "output").read_text()
    assert code == 0 and said.count("the local worker was killed by SIGKILL (exit code -9); what it printed") == 1, said
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (process.pid, first))


def test_a_file_of_the_folder_is_no_worker(tmp_path: Path) -> None:
    """Data is read from the folder where `serve` is called, so who puts data there would run code as the service."""
    for name in ("worker.py", "psutil.py"):
        (tmp_path / name).write_text("print('run')")
    done = subprocess.run([*WORKER, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "run" not in done.stdout.splitlines()


def test_a_worker_that_always_dies_is_given_up(tmp_path: Path) -> None:
    process = serve(tmp_path, free_port(), "-c", "import sys; sys.exit('no device: its own words')")
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()
    said = (tmp_path / "output").read_text()
    assert said.count("no device: its own words") == 5 and said.count("another is started in") == 4, said
    assert said.count("that was the 5th time within 60 s, so the control plane ends too") == 1, said
    assert "Traceback" not in said


def test_a_worker_that_was_told_to_end_is_not_started_again(tmp_path: Path) -> None:
    process = serve(tmp_path, free_port(), "-c", "")
    try:
        until(lambda: "it was told to end" in (tmp_path / "output").read_text(), 60, "the sentence")
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(30) == 0

"""Real worker processes for tests, and waiting for what they do."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from service.client import Client, Unreachable
from service.contract.hardware import HardwareFacts
from tests import commands
from tests.conftest import ROOT

LOOK_SECONDS = 0.05


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition; AssertionError with `what` after a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(LOOK_SECONDS)


def start_worker(
    folder: Path,
    url: str,
    facts: HardwareFacts | None,
    entry: str | None = None,
    lease: float = 3.0,
    key: str = "",
    options: tuple[str, ...] = (),
) -> commands.Started:
    """A worker process on the database, or for the control plane at the URL.

    With facts given, it does not look at the machine's devices.
    """
    command = ["--lease", str(lease), *options]
    if url.startswith("http"):
        command += ["--server", url]
    if entry:
        command += ["--entry", f"tests.stubs:{entry}"]
    if facts:
        file = folder / f"facts-{facts.device}-{facts.index}.json"
        written = facts.model_dump_json()
        if not file.exists() or file.read_text() != written:  # a worker that was started before may be reading it
            file.write_text(written)
        command += ["--facts", str(file)]
    environment = {"DYNOTUNE_DATABASE_URL": url, "DYNOTUNE_DATA_ROOTS": "/", "DYNOTUNE_KEY": key}
    log = folder / "workers.log"
    return commands.start(folder, log, log, "worker", *command, environment=environment)


def free_port() -> int:
    """A port of the loopback address on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(folder: Path, data_root: Path) -> Iterator[str]:
    """`dynotune serve` without a worker, in a process of its own; its URL. It has to end in order."""
    with serving(folder, {"DYNOTUNE_DATA_ROOTS": str(data_root)}) as (port, _):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def serving(folder: Path, settings: dict[str, str]) -> Iterator[tuple[int, int]]:
    """Like `served`, with these environment variables; its port and its process id."""
    port = free_port()
    command = [sys.executable, "-m", "service.cli", "serve", "--port", str(port), "--no-worker"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | settings
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with Client(url) as client:
                return client.workers() == ()
        except Unreachable:
            return False

    try:
        until(answers, 60, "the control plane")
        yield port, process.pid
    finally:
        process.terminate()
        assert process.wait(30) == 0


def ours(tmp_path: Path) -> list[psutil.Process]:
    """Processes of this test that are still alive."""
    found = []
    for process in psutil.process_iter(["environ", "status", "cmdline"]):
        seen = process.info
        keeper = "-S" in (seen["cmdline"] or ())  # the tests' PostgreSQL
        mine = (seen["environ"] or {}).get("DYNOTUNE_HOME") == str(tmp_path / "home") and process.pid != os.getpid()
        if mine and not keeper and seen["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def none_left(tmp_path: Path) -> None:
    """Wait until no process of this test is alive; AssertionError that names those that stay.

    A fork server and its children end by themselves once their worker is gone, a moment after it.
    """
    deadline = time.monotonic() + 20
    while left := ours(tmp_path):
        assert time.monotonic() < deadline, [(process.pid, process.info["cmdline"]) for process in left]
        time.sleep(LOOK_SECONDS)

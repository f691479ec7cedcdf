"""Commands of the project, each in a process of its own, forked from one that has imported what they import.

Most of what a worker or a short command takes are its imports, which are paid for once here. Some tests start theirs
anew: tests/cli/test_cli.py sees what a command imports, tests/e2e what a user starts.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
IMPORTED = ("service.cli.app", "service.cli.export_command", "service.api", "worker.runner.loop", "worker.plan")
LOOK_SECONDS = 0.02
MOST_SECONDS = 120  # of a command that is waited for


class Server:
    """The process from which commands are forked; it ends with this one."""

    def __init__(self) -> None:
        # Not `-m`, by which this module would be there twice; and none of the tests' processes, see tests/processes.py.
        command = [sys.executable, "-c", "from tests.commands import serve; serve()"]
        around = {name: value for name, value in os.environ.items() if not name.startswith("DYNOTUNE_")}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=around | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.communicate, "")

    def ask(self, what: str, *about: Any) -> Any:
        """The server's answer to a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *about]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Started:
    """A process that the server has forked, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            ended, status = self._server.ask("wait", self.pid)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, seconds: float = MOST_SECONDS) -> int:
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), seconds)
            time.sleep(LOOK_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> Server:
    return Server()


def start(
    folder: Path, output: Path, errors: Path, module: str, *arguments: str, environment: dict[str, str]
) -> Started:
    """What `python -m MODULE ARGUMENTS` does in a folder, with these environment variables beside the test's.

    What it prints is appended to the two files. A function is named MODULE:FUNCTION, and called with the arguments.
    """
    around = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    asked = [module, arguments, str(folder), dict(around), str(output), str(errors)]
    return Started(_server(), _server().ask("start", *asked))


def run(folder: Path, module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same until it ends; what it printed, in files of the folder, is replaced by the next command's."""
    output, errors = folder / "printed.txt", folder / "errors.txt"
    for file in (output, errors):
        file.write_text("")
    process = start(folder, output, errors, module, *arguments, environment=environment)
    try:
        code = process.wait()
    finally:
        process.kill()
    return subprocess.CompletedProcess([module, *arguments], code, output.read_text(), errors.read_text())


def serve() -> None:
    """Answer requests: fork a process and say its id, or say whether one has ended and how. A forked one returns."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        what, *about = json.loads(line)
        answer: Any
        if what == "wait":
            answer = os.waitpid(about[0], os.WNOHANG)
        elif (answer := os.fork()) == 0:
            _become(*about)
            return
        print(json.dumps(answer), flush=True)


def _become(
    module: str, arguments: list[str], folder: str, environment: dict[str, str], output: str, errors: str
) -> None:
    """Be the command, as if this process had been started for it."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for file, number in ((os.devnull, 0), (output, 1), (errors, 2)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = [module, *arguments]
    name, _, function = module.partition(":")
    if function:
        getattr(importlib.import_module(name), function)(*arguments)
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

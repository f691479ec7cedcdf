"""The processes of several devices: one that dies is started again, and dies for good after a few times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from service import deaths
from service.contract.hardware import HardwareFacts
from tests.conftest import ROOT
from worker.runner import main
from worker.runner.several import Processes
from worker.runner.stay import Terms

WAITS = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('ready', flush=True); signal.pause()"


@pytest.fixture
def lifeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end of a pipe that processes are given. Nobody waits before he starts one again.

    The test's own handlers of signals are set again afterwards.
    """
    monkeypatch.setattr(deaths, "FIRST_PAUSE_SECONDS", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    theirs, ours = os.pipe()
    yield theirs
    os.close(theirs)
    os.close(ours)
    for number, handler in before.items():
        signal.signal(number, handler)


def run(code: str) -> Sequence[str]:
    return [sys.executable, "-c", code]


def test_a_process_that_was_killed_is_started_again(
    tmp_path: Path, lifeline: int, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    dies_once = f"""
import os, pathlib, signal
mark = pathlib.Path({str(mark)!r})
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    commands = {"cuda:0": run(dies_once), "cuda:1": run("pass")}
    assert Processes(commands, lifeline).run() == 0 and mark.exists()
    assert "the process of cuda:0 ended with exit code 137; it is started again in 0 s." in capfd.readouterr().err


def test_one_that_always_dies_ends_all(lifeline: int, capfd: pytest.CaptureFixture[str]) -> None:
    commands = {"cuda:0": run("exit(3)"), "cuda:1": run(WAITS)}
    assert Processes(commands, lifeline).run() in (3, 128 + signal.SIGTERM)  # the other may not be ready yet
    assert (
        capfd.readouterr().err.count("the process of cuda:0 ended with exit code 3") == deaths.MOST_DEATHS_OF_A_PROCESS
    )


def test_sigterm_ends_all_also_while_they_are_started(lifeline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started = subprocess.Popen
    commands = {"cuda:0": run(WAITS), "cuda:1": run(WAITS)}

    def told_meanwhile(*asked: Any, **more: Any) -> Any:
        made = started(*asked, **more)
        os.kill(os.getpid(), signal.SIGTERM)
        return made

    monkeypatch.setattr(subprocess, "Popen", told_meanwhile)
    assert Processes(commands, lifeline).run() in (0, 128 + signal.SIGTERM), "the second one is not even started"


def test_an_orphan_is_laid_to_rest(tmp_path: Path) -> None:
    """A container's first process inherits the children of a device's process that was killed."""
    leaves = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'pass'])"
    waits = "import sys; sys.stdin.read()"  # until the orphan was seen
    code = f"""
import ctypes, os, subprocess, sys
from worker.runner import several
assert ctypes.CDLL(None).prctl(36, 1) == 0  # PR_SET_CHILD_SUBREAPER, as a container's first process is
laid, wait = [], os.waitpid
def waitpid(pid, options):
    found = wait(pid, options)
    if options == 0:
        laid.append(pid)
        os.close(held)
    return found
os.waitpid = waitpid
theirs, held = os.pipe()
os.dup2(theirs, 0)
commands = {{"cuda:0": [sys.executable, "-c", {leaves!r}], "cuda:1": [sys.executable, "-c", {waits!r}]}}
code = several.Processes(commands, theirs).run()
print(code, len(laid))
"""
    done = subprocess.run(run(code), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "1"], done.stderr


def test_each_is_told_its_device_s_facts(monkeypatch: pytest.MonkeyPatch, facts: Callable[..., HardwareFacts]) -> None:
    """To read them again it would open a context on every GPU, beside what its siblings measure."""
    told: dict[str, HardwareFacts] = {}

    class Told:
        def __init__(self, commands: dict[str, list[str]], lifeline: int) -> None:
            for name, command in commands.items():
                told[name] = main.read_facts(Path(command[command.index("--facts") + 1]))
                assert command[command.index("--devices") + 1] == name and str(lifeline) in command

        def run(self) -> int:
            return 0

    found = [facts(device="cuda", has_own_memory=True, index=number) for number in (0, 1)]
    monkeypatch.setattr("service.devices.device_facts", lambda: found)
    monkeypatch.setattr(main, "Processes", Told)
    with pytest.raises(SystemExit) as ended:
        main.start("all", None, "worker.child.entry:main", 60.0, None, None, Terms())
    assert ended.value.code == 0
    assert told == {"cuda:0": found[0], "cuda:1": found[1]}

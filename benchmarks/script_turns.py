"""Exported scripts take turns with the trial of their recommendation: does a user's run reach what was claimed?

Each script is a process of its own, stopped (SIGSTOP) while others train, and continued for its turns of one optimizer
step, which it reports in its log. So all see the same minutes of a shared machine. A step has the same samples in all
of them; how many tokens that are, train.py says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from service.contract.child import Result, RunBlock, Turn
from worker.runner.measuring import Bench

WARM_STEPS, TURNS = 3, 12
LOOK_SECONDS = 0.02  # between two looks at the log, which take time from the cores that train
LIMIT = 900.0
TRAIN = "train.py"  # whose log has each step's tokens


class Script:
    """A running script that is stopped between its turns."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log
        self.seconds, self.warmed = 0.0, 0

    def warm_up(self, steps: int) -> None:
        """Train so many steps, or a few more, that do not count."""
        self.turn(steps)
        self.seconds, self.warmed = 0.0, len(self.lines())

    def turn(self, steps: int) -> None:
        """Let it train so many steps more."""
        wanted = len(self.lines()) + steps
        began = time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        while self._count() < wanted:
            said = self._log.with_suffix(".txt")
            assert self._process.poll() is None, f"{said.stem} ended: {said.read_text()[-500:]}"
            time.sleep(LOOK_SECONDS)
        self._process.send_signal(signal.SIGSTOP)
        self.seconds += time.perf_counter() - began

    def lines(self) -> list[dict[str, Any]]:
        """Its log: a line a step."""
        text = self._log.read_text() if self._log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _count(self) -> int:
        return self._log.read_bytes().count(b"\n") if self._log.exists() else 0


@contextmanager
def running(script: Path, cwd: Path) -> Iterator[Script]:
    """The script, past its first steps and stopped; killed at the end."""
    log = script.with_suffix(".jsonl")
    log.unlink(missing_ok=True)
    steps = str(2 * (WARM_STEPS + TURNS))  # more than it comes to: train.py may log several steps at once
    command = [sys.executable, str(script), "--max-steps", steps, "--log", str(log)]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # as the script's head advises
    with log.with_suffix(".txt").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--output", str(script.with_suffix(".out"))],
            cwd=cwd,
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        made = Script(process, log)
        made.warm_up(WARM_STEPS)
        yield made
    finally:
        process.kill()
        process.wait()


def compared(
    bench: Bench, request: RunBlock, scripts: Mapping[str, Path], cwd: Path, lock_fd: int | None
) -> dict[str, dict[str, float]]:
    """Non-padding tokens/s of the trial's child (`recommended`) and of each script by name, and first steps' losses.

    One of the scripts is train.py.
    """
    timing = request.candidate.timing
    assert timing is not None
    passes = max(1, round(TURNS / timing.steps))
    with ExitStack() as stack, bench.sandbox.started(request, lock_fd) as child:
        processes = {name: stack.enter_context(running(script, cwd)) for name, script in scripts.items()}
        ending = child.until_paused(LIMIT, lambda: False)
        for turn in range(1, TURNS + 1):
            assert ending is None, ending
            for process in processes.values():
                process.turn(1)
            child.order(Turn(passes=passes * turn / TURNS, last=turn == TURNS))
            ending = child.until_paused(LIMIT, lambda: False)
        lines = {name: process.lines() for name, process in processes.items()}
    seen = [0, *(line["tokens"] for line in lines[TRAIN])]  # tokens after each step
    assert ending is not None and isinstance(ending.last, Result) and ending.last.block and ending.last.block.timing
    ours = sum(one.seconds for one in ending.last.block.slices)
    return {
        "tokens_per_second": {
            "recommended": passes * ending.last.block.timing.tokens / ours,
            **{
                name: (seen[len(lines[name])] - seen[process.warmed]) / process.seconds
                for name, process in processes.items()
            },
        },
        "first_loss": {name: one[0]["loss"] for name, one in lines.items()},
    }

"""An exported train.py takes turns with the trial of its recommendation: does a user's run reach what was claimed?

The script is a process of its own, stopped (SIGSTOP) while the trial's child trains and continued for its turns of one
optimizer step, which it reports in its log. So both see the same minutes of a shared machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from service.contract.child import Result, RunBlock, Turn
from worker.runner.measuring import Bench

WARM_STEPS, TURNS = 3, 12
LOOK_SECONDS = 0.02  # between two looks at the log, which take time from the cores that train
LIMIT = 900.0


class Script:
    """A running train.py that is stopped between its turns."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log, self._seen = process, log, 0

    def turn(self, steps: int) -> tuple[int, float]:
        """Let it train so many steps more; (non-padding tokens of these steps, seconds)."""
        before = self._lines()
        began = time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        while self._count() < len(before) + steps:
            assert self._process.poll() is None, f"train.py ended: {self._log.with_suffix('.txt').read_text()[-500:]}"
            time.sleep(LOOK_SECONDS)
        self._process.send_signal(signal.SIGSTOP)
        seconds = time.perf_counter() - began
        return self._lines()[-1]["tokens"] - (before[-1]["tokens"] if before else 0), seconds

    def _count(self) -> int:
        return self._log.read_bytes().count(b"\n") if self._log.exists() else 0

    def _lines(self) -> list[dict[str, Any]]:
        text = self._log.read_text() if self._log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def running(script: Path, cwd: Path) -> Iterator[Script]:
    """The script, past its first steps and stopped; killed at the end."""
    log = script.with_suffix(".jsonl")
    log.unlink(missing_ok=True)
    steps = str(WARM_STEPS + TURNS + 2)
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
        made.turn(WARM_STEPS)
        yield made
    finally:
        process.kill()
        process.wait()


def compared(bench: Bench, request: RunBlock, script: Path, cwd: Path, lock_fd: int | None) -> dict[str, float]:
    """Non-padding tokens/s of the trial's child and of the script, in turns."""
    timing = request.candidate.timing
    assert timing is not None
    passes = max(1, round(TURNS / timing.steps))
    tokens, seconds = 0, 0.0
    with running(script, cwd) as process, bench.sandbox.started(request, lock_fd) as child:
        ending = child.until_paused(LIMIT, lambda: False)
        for turn in range(1, TURNS + 1):
            assert ending is None, ending
            more = process.turn(1)
            tokens, seconds = tokens + more[0], seconds + more[1]
            child.order(Turn(passes=passes * turn / TURNS, last=turn == TURNS))
            ending = child.until_paused(LIMIT, lambda: False)
    assert ending is not None and isinstance(ending.last, Result) and ending.last.block and ending.last.block.timing
    ours = sum(one.seconds for one in ending.last.block.slices)
    return {"recommended": passes * ending.last.block.timing.tokens / ours, "train.py": tokens / seconds}

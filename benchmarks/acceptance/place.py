"""Where the parts run, what they have found so far, and how long they may go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.acceptance.child import ENTRY, MESSAGES, Answer, Call
from benchmarks.finders.ours import MALLOC
from benchmarks.store import Row
from service.contract.child import EndingKind
from service.contract.hardware import HardwareFacts
from worker.runner.preload import PRELOAD, PRELOAD_CPU
from worker.runner.sandbox import Sandbox

ROOT = Path(__file__).parent.parent.parent
# Dense bf16 TFLOP/s of the data sheets, by a part of the GPU's name; of several that fit, the first one counts.
NOMINAL = {"H200 NVL": 835.5, "H100 NVL": 835.5, "H100 PCIe": 756.0, "H200": 989.0, "H100": 989.0, "A100": 312.0}


class Failed(Exception):
    """A step did not give a row; the text says why."""


class Late(Failed):
    """A process had to be interrupted, and has ended then."""


@dataclass(frozen=True)
class Place:
    """The device, a folder for models, data and results, and the end of this call."""

    facts: HardwareFacts
    home: Path
    dry: bool
    deadline: float
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return self.facts.device

    def left(self) -> float:
        """Seconds until this call has to end."""
        return self.deadline - time.monotonic()

    def pick(self, real: Any, dry: Any) -> Any:
        """What a dry run has in place of the real size."""
        return dry if self.dry else real

    def python(self, *arguments: str, environment: dict[str, str] | None = None, to_end: float = 1.0) -> str:
        """A Python process's standard output; Failed with the end of its errors, or when it takes too long.

        Then it is interrupted, as by Ctrl-C, `to_end` seconds before the end of this call, and killed at the end.
        """
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        own = {name: value for name, value in os.environ.items() if name not in MALLOC}  # as a user has it
        more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "DYNOTUNE_HOME": str(self.home / "state")}
        began, is_late = time.monotonic(), False
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=own | more | (environment or {}),
        ) as process:
            try:
                printed, said = process.communicate(timeout=max(1.0, self.left() - to_end))
            except subprocess.TimeoutExpired:
                is_late = True
                process.send_signal(signal.SIGINT)
                try:
                    printed, said = process.communicate(timeout=max(1.0, self.left()))
                except subprocess.TimeoutExpired as error:
                    raise Failed(f"cut off after {time.monotonic() - began:.0f} s") from error
            finally:
                process.kill()
        if is_late:
            words = said.strip().splitlines()[-1:]
            raise Late(": ".join([f"interrupted after {time.monotonic() - began:.0f} s", *words]))
        if process.returncode:
            raise Failed("\n".join((said.strip() or printed.strip() or "no output").splitlines()[-12:]))
        return printed

    def child(self, module: str, *arguments: Any) -> Row:
        """What the function `child` of a file of this folder returns in a process of its own, see `child.py`."""
        preload = PRELOAD if self.facts.has_own_memory else PRELOAD_CPU
        sandbox = Sandbox(self.facts.has_own_memory, ENTRY, MESSAGES, preload, capability=self.facts.capability)
        seconds = max(1.0, self.left())
        call = Call(module=module, arguments=arguments, dry=self.dry)
        ending = sandbox.run(call, seconds, lambda _: None, lambda: False)
        answer: Any = ending.last
        if isinstance(answer, Answer):
            return answer.row
        said = f"cut off after {seconds:.0f} s" if ending.kind is EndingKind.timed_out else ending.reason
        raise Failed("\n".join([*ending.log.splitlines()[-12:], said]))

    def peak_flops(self) -> dict[str, float]:
        """FLOP/s to hold a speed against: as measured by the part `peak`, and the data sheet's."""
        found = {name: value * 1e12 for name, value in NOMINAL.items() if name in self.facts.name}
        peaks = {"nominal": next(iter(found.values()))} if found else {}
        measured = self.rows.get("peak/matmul", {}).get("tflops")
        return peaks | ({"measured": measured * 1e12} if measured else {})


@dataclass(frozen=True)
class Step:
    """One result: its key, the seconds that have to be left to begin it, and what makes it."""

    key: str
    seconds: float
    make: Callable[[Place], Row]


@dataclass(frozen=True)
class Part:
    """A part: its steps on a place, and the lines that show their rows, which may be few."""

    name: str
    steps: Callable[[Place], list[Step]]
    show: Callable[[Place, dict[str, Row]], list[str]]


def against(value: float | None, wanted: float, text: str) -> str:
    """A figure beside what was wanted of it."""
    if value is None:
        return f"{text}: not measured ({wanted:g} wanted)"
    return f"{text}: {value:.3g} ({wanted:g} wanted{'' if value >= wanted else ': NOT REACHED'})"

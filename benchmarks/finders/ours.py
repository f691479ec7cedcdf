"""The parent's side: dynotune's own finder as a worker runs it, the other finders, and single sizes for the truth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.finders.cases import Case
from benchmarks.finders.messages import MESSAGES, Accepted, Answer, Ask, Begun, Step
from benchmarks.finders.truth import Truth
from benchmarks.store import Row
from service.contract.child import ProbeDone, Workplace
from service.contract.hardware import HardwareFacts
from service.contract.measurement import Outcome
from service.contract.states import Origin
from service.contract.task import TrialRequest
from worker.runner.measuring import Bench, measure
from worker.runner.preload import PRELOAD, PRELOAD_CPU
from worker.runner.sandbox import Ending, Sandbox

CHILD = "benchmarks.finders.child:main"

# glibc reads these when a process starts: tensors are mapped and given back one by one.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Recording(Sandbox):
    """A sandbox that keeps how each of its children ended."""

    def __init__(self, facts: HardwareFacts, own_memory: bool) -> None:
        super().__init__(own_memory, capability=facts.capability)
        self.endings: list[Ending] = []

    def run(self, *args: Any, **more: Any) -> Ending:
        """As a Sandbox does it."""
        self.endings.append(super().run(*args, **more))
        return self.endings[-1]


@dataclass(frozen=True)
class Machine:
    """Where children run: the device's facts and the benchmark's folder."""

    facts: HardwareFacts
    home: Path
    seconds: float
    at_once: int = 1
    deadline: float = math.inf  # by time.monotonic(), past which no child begins or goes on

    def bench(self, sandbox: Sandbox) -> Bench:
        """What every child is given."""
        workplace = Workplace(
            device=self.facts.device, index=self.facts.index, data_roots=(self.home,), hub_cache=self.home / "hub"
        )
        return Bench(sandbox, self.facts, self.home, workplace)

    def child(self, case: Case, finder: str, size: int | None = None) -> Ending:
        """One fresh child of the benchmark's own."""
        preload = PRELOAD_CPU if case.device == "cpu" else PRELOAD
        sandbox = Sandbox(case.device != "cpu", CHILD, MESSAGES, preload, capability=self.facts.capability)
        request = Ask(
            finder=finder,
            spec=case.spec(self.home),
            configuration=case.configuration(),
            workplace=self.bench(sandbox).workplace_of(case.cache),
            size=size,
        )
        return sandbox.run(request, self.limit(self.seconds), lambda _: None, lambda: False)

    def limit(self, seconds: float) -> float:
        """So many seconds, or what is left until the deadline; TimeoutError past it."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the minutes are over")
        return min(seconds, left)


def dynotune(machine: Machine, case: Case) -> Row:
    """The probe of a trial, with a new child after each out-of-memory error."""
    sandbox = Recording(machine.facts, case.device != "cpu")
    request = TrialRequest(
        configuration=case.configuration(),
        origin=Origin.baseline,
        number=1,
        seconds_limit=machine.limit(machine.seconds),
    )
    started = time.perf_counter()
    found, _ = measure(
        machine.bench(sandbox),
        case.spec(machine.home),
        case.cache,
        request,
        lambda _: None,
        lambda: False,
        None,
        only_probe=True,
    )
    seconds = time.perf_counter() - started
    assert found is not None, "nobody ends it from outside"
    training = [probe for probe in found.probes if probe.phase == "training"]
    failed = [probe for probe in training if probe.peak_bytes is None]
    # The first size of a child takes two steps, the first of which makes the optimizer's state.
    first_steps = sum(any(isinstance(message, ProbeDone) for message in one.seen) for one in sandbox.endings)
    return {
        "found": found.largest_micro_batch or 0,
        "probes": len(training),
        "steps": len(training) + first_steps,
        "ooms": len(failed),
        "seconds": seconds,
        "note": "" if found.outcome is Outcome.ok else f"{found.outcome}: {found.reason}",
        "sizes": [probe.micro_batch_size for probe in training],
        "peaks": [probe.peak_bytes for probe in training],
        "capacity": found.capacity_bytes,
        "line": found.memory_line.model_dump() if found.memory_line else None,
        "limited_by": found.limited_by,
    }


def peer(machine: Machine, case: Case, finder: str) -> Row:
    """Another finder in one child; what it had accepted when it died counts as found."""
    started = time.perf_counter()
    ending = machine.child(case, finder)
    seconds = time.perf_counter() - started
    said: list[Any] = ending.seen  # a child of ours speaks in our own messages (finders/messages.py)
    begun = [message.size for message in said if isinstance(message, Begun)]
    accepted = [message.size for message in said if isinstance(message, Accepted)]
    note, found = "", accepted[-1] if accepted else 0
    # A size that was begun and not accepted ran out of memory, but for one that was cut off or died of another error.
    ooms = len(begun) - len(accepted)
    if isinstance(ending.last, Answer):
        found = ending.last.figures["found"]
    else:
        note = f"{ending.kind.replace('_', ' ')}: {ending.reason}"
        ooms -= ending.kind != "out_of_memory" and begun != [] and begun[-1:] != accepted[-1:]
    return {
        "found": found,
        "probes": len(begun),
        "steps": sum(isinstance(message, Step) for message in said),
        "ooms": ooms,
        "seconds": seconds,
        "note": note,
        "sizes": begun,
    }


def truth(machine: Machine, case: Case, start: int, say: Callable[[str], None]) -> Row:
    """The true maximum of a case, and the answers it rests on; RuntimeError when a child ends in another way."""
    peaks: dict[int, int] = {}

    def fits(size: int) -> bool:
        ending = replace(machine, seconds=600).child(case, "truth", size=size)
        if ending.kind not in ("result", "out_of_memory"):
            raise RuntimeError(f"{case.name}, {size} rows: {ending.kind}: {ending.reason}\n{ending.log[-2000:]}")
        if isinstance(ending.last, Answer):
            peaks[size] = max(peaks.get(size, 0), ending.last.figures["peak_bytes"])
        say(f"{case.name}: {size} rows {'fit' if ending.kind == 'result' else 'do not fit'}")
        return ending.kind == "result"

    asked = Truth(fits, machine.at_once)
    largest = asked.largest(start)
    fitted = {str(size): [sum(answers), len(answers)] for size, answers in sorted(asked.seen.items())}
    return {"true": largest, "fitted": fitted, "peaks": {str(size): peaks[size] for size in sorted(peaks)}}


def warm(machine: Machine, case: Case) -> None:
    """Tokenise the case's data into the cache that all its children share; RuntimeError when that fails."""
    if (machine.home / "cache" / case.cache / "data.npz").exists():
        return
    ending = machine.child(case, "truth", size=1)
    if ending.kind != "result":
        raise RuntimeError(f"{case.name}: {ending.kind}: {ending.reason}\n{ending.log[-2000:]}")

"""The soak at what dynotune found, which must hold, and at a tenth more, which should not."""

from __future__ import annotations

import math
import time

from benchmarks.finders.cases import Case
from benchmarks.finders.ours import Machine
from benchmarks.store import Row
from service.contract.child import Result, RunSoak
from service.contract.measurement import Measurement, Outcome
from worker.runner.sandbox import Sandbox

STEPS, LONG_STEPS, QUICK_STEPS = 200, 1000, 20
MORE = 1.1
# Two micro batches a step: the second runs with the gradients of the first in place, as the probe's steps do.
ACCUMULATION = 2
SOAKED = (
    "llama-2m full fp32 1GiB 128",
    "llama-6m lora fp32 1GiB 256",
    "llama-13m lora fp32 1GiB 128",
    "llama-2m lora fp32 1.5GiB 128",
)
LONG = SOAKED[0]
SECONDS = 8 * 3600.0


def sizes(largest: int) -> tuple[int, int]:
    """The size that must hold, and the one that should fail."""
    return largest, math.ceil(MORE * largest)


def soak(machine: Machine, case: Case, micro: int, steps: int) -> Row:
    """One soak as a verification runs it; one that was interrupted goes on where it was."""
    spec = case.spec(machine.home)
    search = spec.search.model_copy(update={"soak_steps": steps, "verify": "standard"})
    spec = spec.model_copy(update={"search": search})
    configuration = case.configuration().model_copy(
        update={"effective_batch_size": ACCUMULATION * micro, "micro_batch_size": micro}
    )
    candidate = Measurement(configuration=configuration, outcome=Outcome.ok, micro_batch_size=micro)
    sandbox = Sandbox(case.device != "cpu", capability=machine.facts.capability)
    bench = machine.bench(sandbox)
    seconds = machine.limit(SECONDS)
    request = RunSoak(workplace=bench.workplace_of(case.cache), spec=spec, candidate=candidate, seed=1, seconds=seconds)
    started = time.perf_counter()
    ending = sandbox.run(request, seconds, lambda _: None, lambda: False, None, bench.host_cap(spec))
    row: Row = {"case": case.name, "micro": micro, "steps": steps, "seconds": time.perf_counter() - started}
    if not isinstance(ending.last, Result) or ending.last.soak is None:
        return row | {"outcome": ending.kind, "done": None, "note": ending.reason}
    held = ending.last.soak
    return row | {
        "outcome": "held",
        "done": held.steps,
        "note": "",
        "peak": held.peak_bytes,
        "growth": held.growth_bytes,
        "segments": held.segments,
    }

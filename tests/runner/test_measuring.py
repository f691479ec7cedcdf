"""What a trial's measurement says of a child that ended without one. No process is started."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.contract.child import Built, ChildFailed, ChildMessage, EndingKind, OutOfMemory, ProbeStarted, Workplace
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, MemoryLine, Outcome
from service.contract.states import Origin, ProbePhase
from service.contract.task import TrialRequest
from tests.factory import DATASET, configuration
from worker.runner.measuring import Bench, measure
from worker.runner.sandbox import Ending

SPEC = JobSpec.model_validate({"model": {"source": "org/model"}, "dataset": {"source": "org/data"}})
GIB = 2**30
BUILT = Built(
    dataset=DATASET,
    capacity_bytes=24 * GIB,
    used_before_bytes=0,
    load_seconds=14.0,
    load_peak_bytes=None,
    weights_dtype="bfloat16",
    parameters=8_000_000_000,
    trainable_parameters=42_000_000,
    lacks={"experts=grouped": "the model has no experts"},
)


def ended(*endings: Ending, line: MemoryLine | None = None, limits: list[float] | None = None) -> Measurement:
    """The measurement of a trial whose children end that way; `limits` gets the seconds that each of them has."""
    left, seconds = list(endings), limits if limits is not None else []

    def watch(limit: float, *_: Any) -> Ending:
        seconds.append(limit)
        return left.pop(0)

    child = SimpleNamespace(watch=watch)
    sandbox: Any = SimpleNamespace(started=lambda *_: contextlib.nullcontext(child))
    facts: Any = SimpleNamespace(has_own_memory=False)
    place = Workplace(device="cpu", data_roots=(), hub_cache=Path())
    trial = TrialRequest(configuration=configuration(), origin=Origin.recipe, number=2, memory_line=line)
    bench = Bench(sandbox, facts, Path(), place)
    found, _ = measure(bench, SPEC, "j", trial, lambda _: None, lambda: False, None)
    assert found is not None
    return found


def test_one_sample_that_does_not_fit_is_told_with_what_was_known() -> None:
    """What takes more than expected (as experts in bf16 do on a CPU) must not read as if nothing could fit."""
    last = OutOfMemory(reason="no memory", used_bytes=int(2.4 * GIB))
    ending = Ending(EndingKind.out_of_memory, last.reason, last, [ProbeStarted(micro_batch_size=1)])
    assert ended(ending).reason == "not even a micro batch of 1 fits; 2.40 GiB were held"
    line = MemoryLine(rest_bytes=1.0 * GIB, slope_bytes=0.25 * GIB)
    assert ended(ending, line=line).reason == (
        "memory ran out at a micro batch of 1, for which configurations that fit suggest 1.25 GiB; 2.40 GiB were held"
    )


def test_one_sample_that_does_not_fit_compiled_is_told_so() -> None:
    last = OutOfMemory(reason="no memory", used_bytes=GIB)
    begun = [ProbeStarted(micro_batch_size=3), ProbeStarted(micro_batch_size=1, phase=ProbePhase.compiled)]
    found = ended(Ending(EndingKind.out_of_memory, last.reason, last, [*begun]))
    assert (found.outcome, found.reason) == (Outcome.infeasible, "not even a micro batch of 1 fits; 1.00 GiB were held")
    assert len(found.probes) == 1, "no other child has tried it again"


def test_downloads_of_the_first_child_take_nothing_of_the_next_one_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1000.0, 1000.0, 1001.0, 1001.0])
    monkeypatch.setattr("worker.runner.measuring.time", SimpleNamespace(monotonic=lambda: next(now)))
    last = OutOfMemory(reason="no memory", used_bytes=GIB)
    seen: list[ChildMessage] = [
        BUILT.model_copy(update={"prepare_seconds": 990.0}),
        ProbeStarted(micro_batch_size=4),
    ]
    limits: list[float] = []
    first = Ending(EndingKind.out_of_memory, last.reason, last, [*seen])
    ended(first, Ending(EndingKind.signal, "killed by SIGSEGV"), limits=limits)
    assert limits[1] == limits[0] - 10


def test_what_a_failed_trial_took_is_told() -> None:
    """Or a search that mostly fails would think that its trials take no time."""
    found = ended(Ending(EndingKind.signal, "killed by SIGSEGV"))
    assert set(found.time_spent) == {"failed"} and found.time_spent["failed"] >= 0.0
    first = ended(
        Ending(EndingKind.signal, "killed by SIGSEGV", None, [BUILT.model_copy(update={"prepare_seconds": 60.0})])
    )
    assert first.time_spent["prepare"] == 60.0, "what it did for all is not what later ones are expected to take"


def test_what_the_model_lacks_is_in_the_measurement_of_a_failed_trial() -> None:
    lacks = {"attention=sdpa": "Gemma2ForCausalLM does not support it"}
    last = ChildFailed(outcome=Outcome.invalid, reason="attention=sdpa cannot be", lacks=lacks)
    found = ended(Ending(EndingKind.failed, last.reason, last))
    assert (found.outcome, found.lacks) == (Outcome.invalid, lacks)


def test_a_trial_that_fails_tells_what_it_had_built() -> None:
    """The search then knows the checkpoint's format and the data's lengths, though nothing has run yet."""
    last = OutOfMemory(reason="no memory", used_bytes=24 * GIB)
    found = ended(Ending(EndingKind.out_of_memory, last.reason, last, [BUILT, ProbeStarted(micro_batch_size=1)]))
    assert found.outcome is Outcome.infeasible and found.probes[0].peak_bytes is None
    assert (found.weights_dtype, found.parameters, found.dataset) == ("bfloat16", 8_000_000_000, DATASET)
    crash = Ending(EndingKind.signal, "killed by SIGSEGV", None, [BUILT])
    found = ended(crash)
    assert (found.outcome, found.reason) == (Outcome.crashed, "killed by SIGSEGV")
    assert found.capacity_bytes == 24 * GIB and found.lacks == BUILT.lacks


def test_memory_that_runs_out_above_one_sample_or_in_an_evaluation_is_tried_again() -> None:
    """A smaller size, or a smaller evaluation's batch, may fit."""
    last, crash = OutOfMemory(reason="no memory", used_bytes=GIB), Ending(EndingKind.signal, "killed by SIGSEGV")
    for begun in (ProbeStarted(micro_batch_size=2), ProbeStarted(micro_batch_size=1, phase=ProbePhase.evaluation)):
        found = ended(Ending(EndingKind.out_of_memory, last.reason, last, [begun]), crash)
        assert (found.outcome, found.reason) == (Outcome.crashed, "killed by SIGSEGV"), "the second child's end"

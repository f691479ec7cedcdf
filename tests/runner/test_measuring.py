"""What a trial's measurement says of a child that ended without one. No process is started."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.contract.child import (
    Built,
    ChildFailed,
    ChildMessage,
    EndingKind,
    OutOfMemory,
    ProbeDone,
    ProbeStarted,
    Result,
    RunTrial,
    Workplace,
)
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, MemoryLine, Outcome, Probe
from service.contract.states import Origin, ProbePhase
from service.contract.task import TrialRequest
from tests.factory import DATASET, configuration, measured
from worker.runner.measuring import LEAST_CHILD_SECONDS, Bench, JobFailed, disk_problem, measure
from worker.runner.sandbox import Ending
from worker.runner.watchdog import LEAST_FREE_BYTES

SPEC = JobSpec.model_validate({"model": {"source": "org/model"}, "dataset": {"source": "org/data"}})
GIB = 2**30
BUILT = Built(
    dataset=DATASET,
    capacity_bytes=24 * GIB,
    used_before_bytes=0,
    load_seconds=14.0,
    load_peak_bytes=None,
    unread_bytes=0,
    weights_dtype="bfloat16",
    parameters=8_000_000_000,
    trainable_parameters=42_000_000,
    lacks={"experts=grouped": "the model has no experts"},
)


def run(*endings: Ending, line: MemoryLine | None = None) -> tuple[Measurement, str, list[RunTrial], list[float]]:
    """(the measurement of a trial whose children end that way, its log, what each was asked, the seconds of each)."""
    left, asked, limits = list(endings), list[RunTrial](), list[float]()

    def watch(limit: float, *_: Any) -> Ending:
        limits.append(limit)
        return left.pop(0)

    def started(request: RunTrial, _: int | None) -> contextlib.AbstractContextManager[Any]:
        asked.append(request)
        return contextlib.nullcontext(SimpleNamespace(watch=watch))

    sandbox: Any = SimpleNamespace(started=started)
    facts: Any = SimpleNamespace(has_own_memory=False)
    place = Workplace(device="cpu", data_roots=(), hub_cache=Path())
    trial = TrialRequest(configuration=configuration(), origin=Origin.recipe, number=2, memory_line=line)
    bench = Bench(sandbox, facts, Path(), place)
    found, log = measure(bench, SPEC, "j", trial, lambda _: None, lambda: False, None)
    assert found is not None
    return found, log, asked, limits


def ended(*endings: Ending, line: MemoryLine | None = None, limits: list[float] | None = None) -> Measurement:
    """The measurement of a trial whose children end that way; `limits` gets the seconds that each of them has."""
    found, _, _, seconds = run(*endings, line=line)
    if limits is not None:
        limits += seconds
    return found


def out_of_memory(*sizes: int, fitted: tuple[int, ...] = (), reason: str = "no memory", **told: Any) -> Ending:
    """The end of a child that began steps of these micro batches, of which some fitted, and then had no memory."""
    begun = [ProbeStarted(micro_batch_size=size) for size in sizes]
    done = [ProbeDone(probe=Probe(micro_batch_size=size, peak_bytes=size * GIB)) for size in fitted]
    last = OutOfMemory(reason=reason, **({"used_bytes": GIB} | told))
    return Ending(EndingKind.out_of_memory, reason, last, [*begun, *done], log=f"{sizes}")


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
    now = iter([0.0, 1000.0, 1001.0, 1004.0])
    monkeypatch.setattr("worker.runner.measuring.time", SimpleNamespace(monotonic=lambda: next(now)))
    first = out_of_memory(4)
    first.seen.append(BUILT.model_copy(update={"prepare_seconds": 990.0}))
    limits: list[float] = []
    found = ended(first, out_of_memory(2), Ending(EndingKind.signal, "killed by SIGSEGV"), limits=limits)
    assert limits == [limits[0], limits[0] - 10, limits[0] - 11]
    assert found.time_spent == {"failed": 14.0, "prepare": 990.0}


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
        seen: list[ChildMessage] = [ProbeStarted(micro_batch_size=1), begun]
        found = ended(Ending(EndingKind.out_of_memory, last.reason, last, seen), crash)
        assert (found.outcome, found.reason) == (Outcome.crashed, "killed by SIGSEGV"), "the second child's end"


def test_the_next_child_knows_what_fitted_and_what_did_not() -> None:
    """It goes on below the size that was begun last, and does not run again what is known to fit."""
    good = measured(configuration(), probes=(Probe(micro_batch_size=3, peak_bytes=3 * GIB),))
    result = Result(measurement=good)
    last = Ending(EndingKind.result, "", result, [ProbeDone(probe=good.probes[0])], log="fine")
    found, log, asked, _ = run(out_of_memory(1, 2, 4, fitted=(1, 2)), last)
    known = tuple(Probe(micro_batch_size=at, peak_bytes=peak) for at, peak in ((1, GIB), (2, 2 * GIB), (4, None)))
    assert [one.known for one in asked] == [(), known] and found.probes == (*known, *good.probes)
    assert found.timing == good.timing and log == "(1, 2, 4)fine", "the log is of all its children"


def test_a_trial_whose_memory_runs_out_again_and_again_is_given_up_with_the_sizes() -> None:
    found = ended(*(out_of_memory(1, size, fitted=(1,)) for size in (16, 8, 4, 2)))
    assert found.outcome is Outcome.infeasible
    assert found.reason == "memory ran out 4 times (micro batches 16, 8, 4, 2), so it is not safe at any size tried"


def test_a_trial_that_has_no_time_left_gives_its_next_child_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to see whether a smaller size fits, or none would be measured where the first took all of the time."""
    now = iter([0.0, 1e6, 1e6, 1e6])
    monkeypatch.setattr("worker.runner.measuring.time", SimpleNamespace(monotonic=lambda: next(now)))
    limits: list[float] = []
    ended(out_of_memory(4), Ending(EndingKind.timed_out, "it took too long"), limits=limits)
    assert limits[1] == LEAST_CHILD_SECONDS > 0


def test_a_child_that_is_too_slow_has_timed_out_and_did_not_crash() -> None:
    """The search then expects that it takes long, and not that one of its choices is broken."""
    assert ended(Ending(EndingKind.timed_out, "it took too long")).outcome is Outcome.timed_out
    assert ended(Ending(EndingKind.exit, "exit code 3")).outcome is Outcome.crashed


@pytest.mark.parametrize(
    ("reason", "needed"),
    [
        ("Tried to allocate 2.00 GiB. GPU 0 has", " and 3.00 GiB (3,221,225,472 bytes) needed to go on"),
        ("Tried to allocate 512.00 MiB. GPU 0 has", " and 1.50 GiB (1,610,612,736 bytes) needed to go on"),
        ("you tried to allocate 1073741824 bytes", " and 2.00 GiB (2,147,483,648 bytes) needed to go on"),
        ("CUDA error: out of memory", ""),
    ],
)
def test_memory_that_is_lacking_is_told_in_bytes_as_far_as_it_is_known(reason: str, needed: str) -> None:
    said = "not even a micro batch of 1 fits; 1.00 GiB were held" + needed
    assert ended(out_of_memory(1, reason=reason)).reason == said
    others = "; 40.0 GiB of this GPU are held by other processes, or outside of torch's allocator"
    assert ended(out_of_memory(1, reason=reason, others_bytes=40 * GIB)).reason == said + others
    assert ended(out_of_memory(1, reason=reason, others_bytes=GIB)).reason == said, "a context takes about as much"


def test_memory_that_runs_out_before_any_step_is_told_so() -> None:
    found = ended(out_of_memory())
    assert (found.outcome, found.probes) == (Outcome.infeasible, ())
    assert found.reason == "memory ran out while it was built; 1.00 GiB were held"


def test_what_no_configuration_can_change_fails_the_job_with_its_log() -> None:
    last = ChildFailed(outcome=Outcome.invalid, reason="there is no column 'text'", whole_job=True)
    with pytest.raises(JobFailed, match="there is no column 'text'") as failure:
        ended(Ending(EndingKind.failed, last.reason, last, log="Traceback"))
    assert failure.value.log == "Traceback"


@pytest.mark.parametrize(("has_own_memory", "cap"), [(False, 3 * GIB), (True, None)])
def test_a_cap_on_a_gpu_s_memory_is_none_on_the_host_s(has_own_memory: bool, cap: int | None) -> None:
    """A child of a GPU's job would be killed for the host memory that it needs to load the model."""
    sandbox: Any = None
    facts: Any = SimpleNamespace(has_own_memory=has_own_memory)
    bench = Bench(sandbox, facts, Path("home"), Workplace(device="cpu", data_roots=(), hub_cache=Path()))
    capped = SPEC.model_copy(update={"hardware": SPEC.hardware.model_copy(update={"memory_gib": 3})})
    assert bench.host_cap(capped) == cap
    assert bench.host_cap(SPEC) is None


def test_too_little_disk_is_told_with_what_is_free_and_needed(tmp_path: Path) -> None:
    assert disk_problem(tmp_path, 0) is None
    said = disk_problem(tmp_path, 1 << 60)
    assert said is not None and f"GiB free at {tmp_path}, 1073741824.0 GiB needed" in said


def test_a_disk_for_temporary_files_on_which_every_child_would_be_ended_is_too_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All trials of all jobs failed there within a second."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used = SimpleNamespace(free=LEAST_FREE_BYTES)
    monkeypatch.setattr("shutil.disk_usage", lambda _: used)
    assert disk_problem(tmp_path, 0) is None
    used.free -= 1
    assert "set TMPDIR to another disk" in (disk_problem(tmp_path, 0) or "")

"""Which micro batches are timed, and what is run before: none without room, none that promise too little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.contract.job import JobSpec
from service.contract.measurement import MemoryLine, Probe
from service.contract.states import Origin
from service.contract.task import TrialRequest
from tests.child import tiny
from tests.factory import configuration
from tests.factory import timing as timing_of
from training.samples import Samples
from worker.child import probe, sizes
from worker.child.curve import Curve, first_size
from worker.child.measure import _evaluation_batch, run_trial, unit_size
from worker.child.size_search import Found

GIB = 1 << 30


@pytest.fixture
def curve() -> Any:
    """A curve under a cap of 3 GiB, of which half a one is taken before a step."""
    made: Any = Curve.__new__(Curve)
    made._bundle = SimpleNamespace(device=SimpleNamespace(capacity=lambda: 3 * GIB))
    made._found, made._rest = Found(4, 12, "memory"), 0.5 * GIB
    made._timed = {4: SimpleNamespace(peak_bytes=1.5 * GIB)}
    return made


def test_a_whole_curve_may_have_one_size_only(curve: Any) -> None:
    """An optimizer that steps in the backward pass takes the whole step as one micro batch."""
    curve._candidates = [16]
    assert curve._below_largest(16) == [16]
    curve._candidates = [1, 2, 4, 8, 16]
    assert curve._below_largest(16) == [16, 8]


@pytest.mark.parametrize(("size", "fits"), [(1, True), (4, True), (8, True), (10, True), (11, False), (16, False)])
def test_a_size_that_nobody_ran_needs_room_as_timing_took_it(curve: Any, size: int, fits: bool) -> None:
    assert curve._has_room(size) is fits, "a quarter of a GiB a row"


def test_two_timed_sizes_make_the_line_whatever_a_probe_ran(curve: Any) -> None:
    """Batches of many lengths leave holes in the heap, which a probe's one batch on a tidy heap does not."""
    curve._timed[8] = SimpleNamespace(peak_bytes=2.5 * GIB)
    curve._found.largest = 12
    assert curve._has_room(10) and not curve._has_room(11)


@pytest.mark.parametrize(
    ("cores", "batching", "first"),
    [(1, "padded", 2), (2, "padded", 4), (64, "padded", 8), (2, "packed", 2), (2, "token-budget", 2)],
)
def test_a_cpu_begins_with_what_keeps_its_cores_busy(
    cores: int, batching: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 200 tokens in the mean and 512 at most; packed ones are full."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    bundle: Any = SimpleNamespace(
        device=SimpleNamespace(gains_from_large_batches=False),
        spec=SimpleNamespace(dataset=SimpleNamespace(max_length=512)),
        data=SimpleNamespace(facts=SimpleNamespace(tokens=2000, rows=10, longest=512)),
        configuration=SimpleNamespace(levers={"batching": batching}),
        recipe=SimpleNamespace(rows_are_packed=batching == "packed"),
    )
    assert first_size(bundle, [1, 2, 4, 8, 16]) == first
    assert first_size(bundle, [1, 2, 4, 8, 16], 8) == 8, "what was fastest with this batching"
    assert first_size(bundle, [1, 2, 4], 8) == min(first, 4), "which does not fit here"
    facts, told = bundle.data.facts, (bundle.data.facts.tokens, bundle.data.facts.longest)
    facts.tokens, facts.longest, bundle.spec.dataset.max_length = 10**7, 10**6, 10**6
    assert first_size(bundle, [1, 2, 4]) == 1, "one row is more than enough"
    (facts.tokens, facts.longest), bundle.spec.dataset.max_length = told, 512
    bundle.device.gains_from_large_batches = True
    assert first_size(bundle, [1, 2, 4, 8, 16]) == 16


@pytest.mark.parametrize(
    ("verify", "effective", "mean", "samples", "uniform"),
    [("quick", 24, 200, 48, 48), ("quick", 32, 200, 64, 32), ("quick", 8, 1000, 48, 48), ("quick", 8, 10, 1008, 1000)]
    + [("full", 32, 2000, 256, 32), ("full", 8, 2000, 64, 32)],
)
def test_the_unit_is_whole_groups_of_steps_with_enough_samples_and_tokens(
    spec: Callable[..., JobSpec], verify: str, effective: int, mean: int, samples: int, uniform: int
) -> None:
    job = spec(training={"effective_batch_size": effective}, search={"verify": verify})
    facts: Any = SimpleNamespace(rows=5000, tokens=5000 * mean, longest=4 * mean)
    assert unit_size(job, facts) == samples
    facts.longest = mean
    assert unit_size(job, facts) == uniform, "rows of one length need no whole groups"


def test_a_unit_of_long_rows_is_one_step(spec: Callable[..., JobSpec]) -> None:
    """An 8B job's 32 rows of 4,096 tokens take ten seconds a pass, which is enough to time."""
    job = spec(training={"effective_batch_size": 32}, search={"verify": "standard"})
    facts: Any = SimpleNamespace(rows=5000, tokens=5000 * 4000, longest=4096)
    assert unit_size(job, facts) == 32


@pytest.fixture
def timing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(a curve of a real bundle whose probe ran 2 of the 8 that it predicts, the sizes whose worst case it runs)."""
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(24))
    bundle = tiny.bundle(tiny.job(llama, data))
    request = TrialRequest(configuration=bundle.configuration, origin=Origin.recipe, number=2, curve=False, passes=1)
    made = Curve(bundle, list(range(16)), request, lambda _: None, 0.0)
    made._deadline = float("inf")
    made._candidates = [1, 2, 4, 8]
    line = MemoryLine(rest_bytes=1 << 50, slope_bytes=1 << 40)
    made._found = Found(2, 8, "memory", line, [Probe(micro_batch_size=2, peak_bytes=1 << 51)])
    ran: list[int] = []
    monkeypatch.setattr(probe, "fits", lambda _, size: ran.append(size))
    return made, ran


def test_a_quick_search_runs_the_worst_case_where_it_may_not_fit(timing: Any) -> None:
    """What the probe ran is warm, and far below what fits is safe; their worst case's peak counts, run or drawn."""
    made, ran = timing
    assert made._time(2) and made._time(4) and made._time(8)
    assert ran == [8]
    peaks = {size: unit.peak_bytes for size, unit in made._timed.items()}
    assert peaks[2] == 1 << 51 and peaks[4] == (1 << 50) + (4 << 40) and peaks[8] < 1 << 40


def test_a_full_search_runs_the_worst_case_of_all_that_the_probe_did_not(timing: Any) -> None:
    made, ran = timing
    made._request = made._request.model_copy(update={"curve": True})
    assert made._time(2) and made._time(4)
    assert ran == [4]


def test_a_gpu_runs_the_worst_case_of_all_that_the_probe_did_not(timing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the first call of its shape would be in the timing."""
    made, ran = timing
    monkeypatch.setattr(made._bundle.device, "first_call_per_shape", True)
    assert made._time(4) and ran == [4]


def test_a_size_that_is_cut_short_is_left_out_and_the_first_ends_the_trial(timing: Any) -> None:
    """With what its user can change: a trial of which nothing was timed has nothing to say."""
    made, _ = timing
    made._deadline = 0.0
    with pytest.raises(TimeoutError, match="one pass over 16 samples did not end in time; allow more minutes"):
        made._time(2)
    made._deadline = float("inf")
    assert made._time(2)
    made._deadline = 0.0
    assert not made._time(4) and list(made._timed) == [2]


def test_a_unit_is_given_up_once_it_is_clearly_slower_than_the_best(timing: Any) -> None:
    made, _ = timing
    assert made._time(2) and made._timed[2].most_seconds is None
    made._request = made._request.model_copy(update={"best_seconds": 1e6})
    assert made._time(4) and made._timed[4].most_seconds == pytest.approx(1.4e6)


@pytest.mark.parametrize(
    ("most", "sentence"),
    [
        (2, "is above search.max_micro_batch_size"),
        (4, "does not fit or divide the effective batch"),
        (None, "does not fit or divide the effective batch"),
    ],
)
def test_why_a_given_size_is_not_used_is_said(timing: Any, most: int | None, sentence: str) -> None:
    made, _ = timing
    search = made._bundle.spec.search.model_copy(update={"max_micro_batch_size": most})
    made._bundle.spec = made._bundle.spec.model_copy(update={"search": search})
    made._candidates = [1, 2]
    assert made._fixed(4) == 2 and made.notes == [f"A micro batch of 4 {sentence}; 2 is used."]


def timed_for(seconds: float, peak: int) -> Any:
    """A unit of one step that takes so many seconds, and so many bytes."""
    told = SimpleNamespace(seconds=seconds)
    return SimpleNamespace(peak_bytes=peak, plan=[[[0]]], timing=lambda: told, updates_seconds=lambda: 0.0)


@pytest.mark.parametrize(("whole", "promised", "tried"), [(True, 9.7, True), (False, 8.1, False), (False, 7.9, True)])
def test_a_quick_search_times_another_size_for_a_fifth_only(
    curve: Any, whole: bool, promised: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = timed_for(8.0, GIB)  # what the model has seen slower: its own words are compared
    curve._timed, curve._shapes, curve._samples, curve._candidates = {4: timed}, [], [], [1, 2, 4]
    curve._request, curve._bundle.data = SimpleNamespace(curve=whole), SimpleNamespace(lengths=[])
    monkeypatch.setattr(sizes, "cost_model", lambda _: None)
    monkeypatch.setattr(curve, "_promise", lambda size, *_: {4: 10.0, 2: promised, 1: 0.1}[size])
    assert curve._promising() == (2 if tried else None), "1 is too far from what was timed"


@pytest.mark.parametrize(("peak", "asked", "tried"), [(1.5, 8, True), (2.0, 8, False), (0.6, 16, False)])
def test_a_size_that_promises_much_is_timed_if_it_has_room_and_is_near(
    curve: Any, peak: float, asked: int, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 GiB 8 rows take 3.5 where 4 take two; and of 16 rows the timings of 4 tell too little."""
    timed = timed_for(8.0, int(peak * GIB))
    curve._timed, curve._shapes, curve._samples, curve._candidates = {4: timed}, [], [], [4, asked]
    curve._request, curve._bundle.data = SimpleNamespace(curve=True), SimpleNamespace(lengths=[])
    monkeypatch.setattr(sizes, "cost_model", lambda _: None)
    monkeypatch.setattr(curve, "_promise", lambda size, *_: {4: 10.0, asked: 1.0}[size])
    assert curve._promising() == (asked if tried else None)


def memory_curve_of(monkeypatch: pytest.MonkeyPatch, spec: Any, seconds: dict[int, float], limit: float | None) -> Any:
    """A curve of a job for the least memory, on a GPU on which a unit takes so many seconds at each size."""
    made: Any = Curve.__new__(Curve)
    device = SimpleNamespace(gains_from_large_batches=True)
    rows = SimpleNamespace(facts=SimpleNamespace(tokens=12_800))
    made._bundle = SimpleNamespace(device=device, spec=spec, data=rows)
    made._request = SimpleNamespace(slowest_run_seconds=limit)
    made._candidates, made._timed, made._once, made._minimises_memory = sorted(seconds), {}, 1.0, True

    def time_one(size: int) -> bool:
        unit = SimpleNamespace(timing=lambda: timing_of(seconds[size], micro=size), first_calls=lambda: 0.5, micro=size)
        made._timed[size] = unit
        return True

    monkeypatch.setattr(made, "_time", time_one)
    return made


SECONDS = {1: 16.0, 2: 10.0, 4: 7.0, 8: 5.0, 16: 4.5, 32: 4.0}


@pytest.mark.parametrize(
    ("limit", "timed", "size"),
    [
        (11.5 / 0.98, [8, 2, 1], 2),  # ten seconds are within, with what is left for the verification
        (1.5 + 7.0 * 1.01, [8, 2, 4], 8),  # 4 is within by less than that
        (5.0, [8, 32], 32),  # none is fast enough: the fastest
        (None, [8, 2, 1], 1),  # no baseline ran
    ],
)
def test_for_memory_the_smallest_size_that_is_fast_enough_is_looked_for(
    spec: Callable[..., JobSpec],
    monkeypatch: pytest.MonkeyPatch,
    limit: float | None,
    timed: list[int],
    size: int,
) -> None:
    """Of an epoch of 64 rows, which is one unit; loading takes a second and first calls half a one."""
    job = spec(training={"epochs": 1}, search={"objective": "memory"})
    made = memory_curve_of(monkeypatch, job, SECONDS, limit)
    made._time_smallest()
    assert list(made._timed) == timed and made._recommended().micro == size


def test_a_device_that_gains_nothing_from_large_batches_begins_with_the_smallest(
    spec: Callable[..., JobSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = memory_curve_of(monkeypatch, spec(training={"epochs": 1}), SECONDS, 20.0)
    made._bundle.device.gains_from_large_batches = False
    made._time_smallest()
    assert list(made._timed) == [1]


@pytest.mark.parametrize(
    ("objective", "apart", "size"),
    [("memory", False, 4), ("memory", True, 2)] + [("wall-clock", False, 16), ("wall-clock", True, 2)],
)
def test_a_search_for_memory_evaluates_no_more_than_a_micro_batch(
    spec: Callable[..., JobSpec], monkeypatch: pytest.MonkeyPatch, objective: str, apart: bool, size: int
) -> None:
    """Of a micro batch of 4, and an evaluation that was found to fit at 16, or in a probe of its own at 2."""
    monkeypatch.setattr(probe, "evaluated_rows", lambda _, largest, __: largest)
    bundle: Any = SimpleNamespace(spec=spec(search={"objective": objective}))
    probed: Any = SimpleNamespace(largest=16, probes=())
    assert _evaluation_batch(bundle, probed, 2, 4, apart) == size


def test_a_fixed_micro_batch_is_evaluated_with_as_many_tokens(llama: Path, tmp_path: Path) -> None:
    """Where validation samples are four times as long as any that is trained, a quarter of its rows."""
    bundle = tiny.bundle(tiny.job(llama, tiny.write(tmp_path / "rows.jsonl", tiny.pairs(60))), "lora")
    ids, labels = max(bundle.data.train, key=lambda one: len(one[0]))
    bundle.data = replace(bundle.data, validation=Samples([(ids * 4, labels * 4)]))
    probed: Any = SimpleNamespace(largest=16, probes=())
    assert _evaluation_batch(bundle, probed, 4, 16, apart=False) == 4


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
def test_a_trial_tells_what_updates_take_and_what_ran_before_it_was_timed(llama: Path, tmp_path: Path) -> None:
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(24))
    job = tiny.job(llama, data, search={"objective": "memory", "verify": "quick"})
    made = configuration(effective=8, precision="fp32")
    asked = TrialRequest(configuration=made, origin=Origin.search, number=2, slowest_run_seconds=1e6)
    found, _ = run_trial(job, asked, tiny.device(), tiny.workplace(llama, tmp_path), lambda _: None)
    assert found.timing and 0 < (found.timing.update_seconds or 0) < found.timing.seconds
    assert found.micro_batch_size == 1 and found.time_spent["warm-up"] > 0 and found.time_spent["timing"] > 0

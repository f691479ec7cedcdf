"""Which micro batches are timed, and what is run before: none without room, none that promise too little."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.contract.measurement import MemoryLine, Probe
from service.contract.task import TrialRequest
from tests.trial import tiny
from worker.trial import probe, sizes
from worker.trial.curve import Curve

GIB = 1 << 30


@pytest.fixture
def curve() -> Any:
    """A curve under a cap of 3 GiB, of which half a one is taken before a step."""
    made = Curve.__new__(Curve)
    made._bundle = SimpleNamespace(device=SimpleNamespace(capacity=lambda: 3 * GIB))
    made._found, made._rest = probe.Found(4, 12, "memory"), 0.5 * GIB
    made._timed = {4: SimpleNamespace(peak_bytes=1.5 * GIB)}
    return made


@pytest.mark.parametrize(("size", "fits"), [(1, True), (4, True), (8, True), (10, True), (11, False), (16, False)])
def test_a_size_that_nobody_ran_needs_room_as_timing_took_it(curve: Any, size: int, fits: bool) -> None:
    assert curve._has_room(size) is fits, "a quarter of a GiB a row"


def test_two_timed_sizes_make_the_line_and_what_a_probe_ran_is_tried_anyway(curve: Any) -> None:
    curve._timed[8] = SimpleNamespace(peak_bytes=2.8 * GIB)
    assert not curve._has_room(9)
    curve._found.largest = 12
    assert curve._has_room(12) and not curve._has_room(13)


@pytest.fixture
def timing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(a curve of a real bundle whose probe ran 2 of the 8 that it predicts, the sizes whose worst case it runs)."""
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(24))
    bundle = tiny.bundle(tiny.job(llama, data))
    request = TrialRequest(configuration=bundle.configuration, origin="recipe", number=2, curve=False, passes=1)
    made = Curve(bundle, list(range(16)), request, probe.Tell(lambda _: None), 0.0)
    made._deadline = float("inf")
    made._candidates = [1, 2, 4, 8]
    line = MemoryLine(rest_bytes=1 << 50, slope_bytes=1 << 40)
    made._found = probe.Found(2, 8, "memory", line, [Probe(micro_batch_size=2, peak_bytes=1 << 51)])
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


@pytest.mark.parametrize(("whole", "promised", "tried"), [(True, 9.7, True), (False, 9.7, False), (False, 8.9, True)])
def test_a_quick_search_times_another_size_for_a_tenth_only(
    curve: Any, whole: bool, promised: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = SimpleNamespace(
        peak_bytes=GIB,
        plan=[[0]],
        timing=lambda: SimpleNamespace(seconds=10.0),
        pieces=SimpleNamespace(best=lambda: {(0, 1): [0.0]}),
    )
    curve._timed, curve._shapes, curve._samples, curve._candidates = {4: timed}, [], [], [1, 4]
    curve._request, curve._bundle.data = SimpleNamespace(curve=whole), SimpleNamespace(lengths=[])
    monkeypatch.setattr(sizes, "cost_model", lambda _: None)
    monkeypatch.setattr(sizes, "predict", lambda *_: promised)
    monkeypatch.setattr("worker.trial.curve.plan_of", lambda *_: [])
    assert curve._promising() == (1 if tried else None)

"""Candidates that are alive together: in which order they train, what happens when one dies, and when they fit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.contract.child import EndingKind, RunBlock, Workplace
from service.contract.job import JobSpec
from tests.conftest import ROOT
from tests.factory import configuration, measured, timing
from worker.runner.sandbox import Ending, Sandbox
from worker.runner.together import course, fit_together, take_turns

BATCHINGS = ("padded", "packed", "sorted")


@pytest.fixture
def taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: Callable[..., JobSpec]
) -> Iterator[Callable[..., tuple[list[Ending], list[str]]]]:
    """Takes turns with a stub child a batching; how they ended, and the turns in their order."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DYNOTUNE_LOCKS", str(tmp_path))
    sandbox = Sandbox(False, "tests.stubs:turning")

    def take(*batchings: str, ended: Callable[[], bool] = lambda: False) -> tuple[list[Ending], list[str]]:
        place = Workplace(device="cpu", data_roots=(tmp_path,), hub_cache=tmp_path)
        candidates = [measured(configuration(batching=one), 10.0) for one in batchings]
        asked = [
            RunBlock(workplace=place, spec=spec(), candidate=one, block=0, seed=1, in_turns=True) for one in candidates
        ]
        with contextlib.ExitStack() as stack:
            endings = take_turns(
                lambda one: stack.enter_context(sandbox.started(one)), asked, [60.0] * len(asked), ended, None
            )
        file = tmp_path / "turns"
        return endings, file.read_text().splitlines() if file.exists() else []

    yield take
    sandbox.close()


def test_every_other_round_goes_backwards_and_ends_with_the_results(taken: Callable[..., Any]) -> None:
    endings, turns = taken("padded", "sorted")
    assert [ending.kind for ending in endings] == [EndingKind.result] * 2
    names = [turn.split()[0] for turn in turns]
    assert len(turns) == 16 and names[:4] == ["padded", "sorted", "sorted", "padded"]
    shares = [float(turn.split()[1]) for turn in turns]
    assert shares[::2] == shares[1::2] and shares[-1] == 1.0 and shares == sorted(shares)


def test_one_that_dies_is_out_and_the_others_go_on(taken: Callable[..., Any]) -> None:
    endings, turns = taken(*BATCHINGS)
    assert [ending.kind for ending in endings] == ["result", "signal", "result"] and "SIGSEGV" in endings[1].reason
    names = [turn.split()[0] for turn in turns]
    assert names.count("packed") == 2 and names.count("padded") == names.count("sorted") == 8


def test_a_job_that_is_cancelled_ends_all_of_them(taken: Callable[..., Any]) -> None:
    endings, _ = taken("padded", "sorted", ended=lambda: (Path(os.environ["DYNOTUNE_LOCKS"]) / "turns").exists())
    assert {ending.kind for ending in endings} == {EndingKind.ended}


def test_a_turn_of_the_slowest_takes_about_two_seconds() -> None:
    assert course([timing(30.0), timing(10.0)], [100, 100], 60.0) == (1, 15)
    assert course([timing(1.0)], [100], 60.0) == (5, 8), "a short unit is trained several times"
    assert course([timing(0.1)], [100], 60.0) == (30, 8), "and a very short one for three seconds"
    assert course([timing(30.0)], [4], 60.0) == (1, 4), "no more turns than micro batches"
    assert course([timing(1.0)], [100], 0.5) == (2, 8), "a block of a job of half a minute takes a twentieth of it"
    assert course([timing(0.1)], [100], 0.5) == (15, 8)
    assert course([timing(30.0)], [100], 0.5) == (1, 15), "but all of the unit"


def test_they_fit_when_their_peaks_do(facts: Callable[..., Any]) -> None:
    three = [measured(configuration(batching=one), peak_bytes=4 << 30) for one in BATCHINGS]
    assert fit_together(three, facts(memory_bytes=16 << 30))
    assert not fit_together(three, facts(memory_bytes=13 << 30))
    assert not fit_together(three, facts(memory_bytes=16 << 30, for_one_process=True)), "the second would not start"
    assert not fit_together([*three, measured(configuration(), peak_bytes=None)], facts(memory_bytes=1 << 40))

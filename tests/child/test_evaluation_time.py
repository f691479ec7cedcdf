"""A trial times an evaluation where the run's evaluations take a share of it, and a packed run's batch is not small."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.contract.measurement import Probe
from service.contract.states import Origin, ProbePhase
from service.contract.task import TrialRequest
from tests.child import tiny
from tests.factory import configuration
from training.samples import Samples
from worker.child import evaluation_time, probe
from worker.child.measure import run_trial

ROUNDING = 0.001  # seconds, of what a trial spent
TRAINING = {"effective_batch_size": 8, "learning_rate": 1e-3}


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("every", "timed"), [(1, True), (None, False)])
def test_evaluations_are_timed_where_they_count(llama: Path, tmp_path: Path, every: int | None, timed: bool) -> None:
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(48))
    job = tiny.job(
        llama, data, search={"verify": "quick"}, training=TRAINING | {"evaluation_steps": every, "epochs": 9}
    )
    asked = TrialRequest(configuration=configuration(effective=8), origin=Origin.search, number=2)
    found, _ = run_trial(job, asked, tiny.device(), tiny.workplace(llama, tmp_path), lambda _: None)
    assert (found.evaluation_seconds is not None) is timed
    assert ("evaluation" in found.time_spent) is timed
    if found.evaluation_seconds is not None:
        # All of its few batches are timed, so that the trial spent at least as long on it.
        assert 0 < found.evaluation_seconds <= found.time_spent["evaluation"] + ROUNDING


def test_longer_validation_samples_than_any_trained_have_smaller_batches(llama: Path, tmp_path: Path) -> None:
    """Otherwise the batch, which is sized by what fits in training, might run out of memory in an evaluation."""
    bundle = tiny.bundle(tiny.job(llama, tiny.write(tmp_path / "rows.jsonl", tiny.pairs(60))), "lora")
    assert probe.evaluated_rows(bundle, 16) == 16
    ids, labels = max(bundle.data.train, key=lambda one: len(one[0]))
    longer = (ids * 4, labels * 4)
    bundle.data = replace(bundle.data, validation=Samples([*bundle.data.validation, longer]))
    assert probe.evaluated_rows(bundle, 16) == 4 and probe.evaluated_rows(bundle, 2) == 1


def test_what_is_timed_stands_for_all(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second a padded token tells the seconds of all of them, in any batch size."""
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(600))
    job = tiny.job(llama, data)
    bundle = tiny.bundle(job)
    now = 0.0

    def guessed(_: Any, samples: list[Any], *__: Any) -> dict[str, float]:
        nonlocal now
        assert not bundle.model.training
        now += len(samples) * max(len(ids) for ids, _ in samples)
        return {}

    monkeypatch.setattr(evaluation_time, "guesses", guessed)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    ordered = sorted((len(ids) for ids, _ in bundle.data.validation), reverse=True)
    for size in (1, 4, 64):
        every = sum(len(part) * part[0] for part in (ordered[at : at + size] for at in range(0, len(ordered), size)))
        assert evaluation_time.evaluation_seconds(bundle, size) == pytest.approx(every)
    assert bundle.model.training


def test_packed_rows_are_evaluated_in_batches_of_as_many_tokens(llama: Path, tmp_path: Path) -> None:
    data = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(40))
    job = tiny.job(llama, data, 256)
    bundle = tiny.bundle(job, batching="packed")
    longest = max(len(ids) for ids, _ in bundle.data.validation)
    assert longest < 128 and probe.evaluated_rows(bundle, 2) == 512 // longest
    wide = tiny.bundle(job, batching="packed", padding="max")
    assert probe.evaluated_rows(wide, 2) == 2, "all are padded to the longest that there may be"
    failed = Probe(micro_batch_size=3, peak_bytes=None, phase=ProbePhase.evaluation)
    assert probe.evaluated_rows(bundle, 2, (failed,)) < 3, "a batch that ran out of memory is not tried again"
    plain = tiny.bundle(job)
    assert probe.evaluated_rows(plain, 2) == 2 and probe.evaluated_rows(plain, 0) == 1

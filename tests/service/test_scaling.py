"""Twice the user's effective batch is named where the run is predicted to be clearly faster, and only named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, MemoryLine
from service.contract.states import Origin
from service.recommend import recommend
from service.scaling import larger_batch, learning_rate, scaled
from tests.factory import DATASET, configuration, measured, record, timing

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]
MANY = DATASET.model_copy(update={"rows": 10_000})


def best(updates: float = 0.0, small: float = 10.0, **changes: Any) -> Measurement:
    """A unit of 10 s at a micro batch of 32, the whole step; so many of these are updates, and 16 takes `small` s."""
    values: dict[str, Any] = {
        "timing": timing(10.0, micro=32).model_copy(update={"update_seconds": updates}),
        "curve": (timing(small, micro=16).model_copy(update={"update_seconds": updates}), timing(10.0, micro=32)),
        "memory_line": MemoryLine(rest_bytes=1e9, slope_bytes=1e7),
        "gradient_accumulation_steps": 1,
        "micro_batch_size": 32,
        "dataset": MANY,
        "load_seconds": 0.0,
    }
    return measured(configuration(), **(values | changes))


def test_fewer_updates_pay(spec: Spec) -> None:
    said = larger_batch(spec(), best(updates=4.0))
    assert said is not None and said.startswith(
        "An effective batch of 64 instead of 32 is predicted to make the run 1.25 times as fast, with a learning rate "
        "of 0.000282843 (scaled by the square root of 2). It was not measured: it is predicted from the time of the "
        "work unit (half as many optimizer updates, which take 40% of it)."
    )


def test_larger_micro_batches_pay(spec: Spec) -> None:
    """16 takes 14 s: each micro batch of the unit of 64 samples takes 2 s beside its samples, so that 64 takes 8 s."""
    said = larger_batch(spec(), best(small=14.0))
    assert said is not None and "1.25 times as fast" in said
    assert "a micro batch of 64, by those of 16 and 32 that were timed" in said


@pytest.mark.parametrize(
    ("job", "changes"),
    [
        ({}, {"updates": 1.6}),  # 8% would be saved, which may be nothing
        ({"training": {}}, {"updates": 4.0}),  # the search chooses the effective batch
        ({"search": {"objective": "memory"}}, {"updates": 4.0}),
        ({}, {"updates": 4.0, "dataset": MANY.model_copy(update={"rows": 64 * 49})}),  # too few steps would be left
        ({}, {"small": 14.0, "gradient_accumulation_steps": 2}),  # the micro batch could be larger as it is
        ({}, {"small": 14.0, "memory_line": MemoryLine(rest_bytes=1e9, slope_bytes=1e8)}),  # 64 would not fit
        ({"search": {"max_micro_batch_size": 32}}, {"small": 14.0}),
        ({}, {"small": 9.0}),  # larger ones are slower
    ],
)
def test_nothing_is_said_where_it_would_not_pay(spec: Spec, job: dict[str, Any], changes: dict[str, Any]) -> None:
    assert larger_batch(spec(**job), best(**changes)) is None


def test_it_is_a_note_and_changes_nothing(spec: Spec, facts: Facts) -> None:
    base = measured(configuration(micro=8), 20.0, dataset=MANY)
    found = recommend("j", spec(), facts(), (record(base, Origin.baseline), record(best(updates=4.0))), {})
    assert found and found.notes[-1].endswith("It is not part of this answer, as it changes what is learnt.")
    assert found.configuration.effective_batch_size == 32 and found.configuration.learning_rate == 2e-4


def test_the_rate_goes_with_the_root_and_for_plain_descent_with_the_batch(spec: Spec) -> None:
    assert scaled(1e-4, 4.0) == 2e-4 and scaled(1e-4, 4.0, "sgd") == 4e-4
    job = spec(training={"learning_rate": 1e-4})
    assert learning_rate(job, "lora", 32, "adamw-fused") == 2e-4, "the search's own rule"
    assert learning_rate(spec(), "lora", 32, "sgd") == 2e-4, "it is for the batch that was asked for"
    assert learning_rate(spec(), "full", 32, "adamw-fused") == 5e-5, "whole weights take less than a new adapter"
    sgd = best(updates=4.0).model_copy(update={"configuration": configuration(optimizer="sgd")})
    assert "learning rate of 0.0004 (scaled in proportion, as sgd is not adaptive)" in (larger_batch(spec(), sgd) or "")

"""Which configurations a search looks at, and what they promise together: worker/plan/acquisition.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from tests.factory import configuration, measured, timing
from tests.plan.test_surrogate import GPU, grid_of, seen
from worker.plan.acquisition import Acquisition
from worker.plan.grid import Grid, Rows
from worker.plan.view import View

SHARED: dict[str, Any] = {"precision": "bf16-mixed", "attention": "varlen", "batching": "padding-free"}


@pytest.fixture
def view(spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]) -> View:
    """A job with a baseline and three trials, two of them fast with a choice of their own."""
    slow = configuration(**SHARED)
    fast = [configuration(**SHARED, optimizer="adamw-8bit"), configuration(**SHARED, loading="workers-2")]
    trials = [measured(configuration(), 20.0), measured(slow, 14.0), *(measured(one, 10.0) for one in fast)]
    return seen(spec(), facts(**GPU), *trials)


def test_choices_that_were_in_no_trial_come_first(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of single switches: how the choices of the two fast trials go together waits for the other turns."""
    monkeypatch.setattr("worker.plan.acquisition.MOST", 10_000)
    known = {of for one in view.history for of in one.configuration.levers.items()}
    sizes = {one.configuration.effective_batch_size for one in view.history}
    single, double = (
        [bool(one.levers.items() - known) or one.effective_batch_size not in sizes for one, _ in found]
        for found in (Acquisition(view).best(switches) for switches in (1, 2))
    )
    assert len(single) > 10 and all(single) and not all(double)


def test_the_sum_of_what_levers_promise_is_left(view: View) -> None:
    """More than what the best single switch promises, and less than what all of them do."""
    promised = [promise for _, promise in Acquisition(view).best(1)]
    assert promised[0] < Acquisition(view).left() < sum(promised)


def test_a_configuration_that_was_measured_twice_is_one_of_the_best_two(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its least disturbed reading, and not by its luckiest."""
    repeated, second = (configuration(**SHARED, optimizer=one) for one in ("adamw-8bit", "adamw-bnb-32bit"))
    readings = [
        measured(repeated, seconds, timing=timing(seconds).model_copy(update={"clean_share": share}))
        for seconds, share in ((6.0, 0.2), (11.0, 1.0))
    ]
    view = seen(spec(), facts(**GPU), measured(configuration(), 20.0), *readings, measured(second, 10.0))
    around: list[tuple[int, ...]] = []
    plain = Grid.neighbours

    def noted(grid: Grid, row: Rows, switches: int = 1) -> Rows:
        around.append(tuple(row))
        return plain(grid, row, switches)

    found = Acquisition(view)
    monkeypatch.setattr(Grid, "neighbours", noted)
    found.best(1)
    assert around == [tuple(grid_of(view).encode(one)) for one in (second, repeated)]

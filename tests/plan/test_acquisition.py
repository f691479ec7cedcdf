"""Which configurations a search looks at, and what they promise together: worker/plan/acquisition.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.levers import LEVERS
from tests.factory import configuration, failed, measured, timing
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
    assert looked_around(view, monkeypatch) == [second, repeated]


@pytest.mark.parametrize(
    ("slower", "is_short", "second"), [(0, False, "near"), (2, False, "far"), (1, True, "near"), (5, True, "far")]
)
def test_half_of_the_trials_look_around_what_is_good_and_far_from_the_best(
    spec: Callable[..., JobSpec],
    facts: Callable[..., HardwareFacts],
    monkeypatch: pytest.MonkeyPatch,
    slower: int,
    is_short: bool,
    second: str,
) -> None:
    """Where memory is short, once enough have run; a single switch away, much the same would be looked at twice."""
    best = configuration(**SHARED)
    near = configuration(**SHARED, optimizer="adamw-8bit")
    far = configuration(precision="bf16-mixed", attention="sdpa", batching="sorted", optimizer="adamw-8bit")
    known = LEVERS["optimizer"].baseline, "adamw-8bit"
    others = [configuration(**SHARED, optimizer=one) for one in LEVERS["optimizer"].names if one not in known]
    trials = [(configuration(), 20.0), (best, 10.0), (near, 10.1), (far, 10.2), *((one, 15.0) for one in others)]
    short = [failed(configuration(checkpointing="full"))] if is_short else []
    view = seen(spec(), facts(**GPU), *(measured(made, seconds) for made, seconds in trials[: 4 + slower]), *short)
    assert looked_around(view, monkeypatch) == [best, {"near": near, "far": far}[second]]


def looked_around(view: View, monkeypatch: pytest.MonkeyPatch) -> list[Configuration | None]:
    """The configurations whose neighbours the search looks at."""
    around: list[Rows] = []
    plain = Grid.neighbours

    def noted(grid: Grid, row: Rows, switches: int = 1) -> Rows:
        around.append(row)
        return plain(grid, row, switches)

    found = Acquisition(view)
    with monkeypatch.context() as patched:
        patched.setattr(Grid, "neighbours", noted)
        found.best(1)
    return [grid_of(view).decode(row) for row in around]

"""The clock of a training step: clean timings, their interval, the unit, and what the device waits for."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from service.levers import LEVERS
from tests.child import tiny
from training import batches
from worker.child import steps, windows
from worker.child.arrange import plan_of
from worker.child.build import Bundle
from worker.child.pieces import MOST_OTHERS, Pieces, interval, stalling
from worker.child.timing import Unit, piece_count, time_unit
from worker.devices.cpu import Cpu

SAMPLES = list(range(16))


class Neighboured(Cpu):
    """The CPU, with a neighbour that the test decides on: the n-th window's share is the n-th of `shares`."""

    def __init__(self, shares: Any) -> None:
        super().__init__()
        self.shares = iter(shares)

    def others_share(self, first: Any, last: Any) -> float:
        """As told."""
        assert last[0] >= first[0]
        share: float = next(self.shares)
        return share


@pytest.fixture
def made(llama: Path, functions: Path) -> Callable[..., Bundle]:
    """Makes bundles of the tiny Llama."""
    spec = tiny.job(llama, functions)
    return lambda method="full", device=None, **levers: tiny.bundle(spec, method, device, **levers)


def test_clean_timings_replace_the_others_and_are_counted() -> None:
    pieces = Pieces()
    pieces.add((0, 0), 9.0, 0.5)
    assert pieces.best() == {(0, 0): [9.0]} and pieces.clean_share() == 0 and pieces.short(1, 1)
    pieces.add((0, 0), 2.0, MOST_OTHERS)
    assert pieces.best() == {(0, 0): [2.0]} and pieces.clean_share() == 0.5 and not pieces.short(1, 1)
    pieces.add((0, 1), 7.0, MOST_OTHERS + 0.001)
    assert pieces.best() == {(0, 0): [2.0], (0, 1): [7.0]} and pieces.worst_share == 0.5
    assert pieces.short(2, 1), "the second piece has no clean timing"
    pieces.add((0, 1), 3.0, 0.0)
    assert not pieces.short(2, 1) and pieces.short(2, 2) and pieces.short(3, 1)


def test_timings_of_which_nobody_can_tell_are_used_but_not_called_clean() -> None:
    pieces = Pieces()
    for _ in range(3):
        pieces.add((0, 0), 2.0, None)
    assert pieces.clean_share() is None and pieces.worst_share is None
    assert pieces.best() == {(0, 0): [2.0] * 3} and not pieces.short(1, 3), "running them again would tell no more"
    pieces.add((0, 0), 2.0, 0.0)
    assert pieces.clean_share() == 0.25 and pieces.worst_share == 0.0


def test_the_interval_brackets_the_sum_of_medians_and_shrinks_with_more_timings() -> None:
    rng = random.Random(0)

    def noisy(count: int) -> dict[tuple[int, int], list[float]]:
        return {(0, at): [(1 + at) * rng.gauss(1, 0.05) for _ in range(count)] for at in range(12)}

    few, many = noisy(3), noisy(30)
    for pieces in (few, many):
        total, low, high = interval(pieces)
        assert total == pytest.approx(sum(map(statistics.median, pieces.values())))
        assert low <= total <= high and low < high
        assert interval(pieces) == (total, low, high), "the same every time"
    assert interval(many)[2] - interval(many)[1] < 0.6 * (interval(few)[2] - interval(few)[1])


def test_stalls_are_in_the_means_and_in_no_median() -> None:
    """Of four passes over ten pieces, each stalls in another piece for nine times as long as the piece takes."""
    pieces = {(0, at): [10.0 if at == number else 1.0 for number in range(4)] for at in range(10)}
    assert interval(pieces)[0] == 10.0 and stalling(pieces) == pytest.approx(1.9)
    assert stalling({(0, 0): [2.0], (0, 1): [3.0, 3.0]}) == 1.0


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(60):
        pieces = {(0, at): [rng.gauss(1, 0.05) for _ in range(5)] for at in range(8)}
        _, low, high = interval(pieces)
        held += low <= 8.0 <= high
    assert held >= 48, f"the true sum lay inside {held} of 60"


def test_single_timings_take_their_spread_from_the_shapes() -> None:
    once = {(0, at): [1.0] for at in range(8)}
    assert interval(once) == (8.0, 8.0, 8.0)
    total, low, high = interval(once, [-0.2, -0.1, 0.1, 0.2])
    assert low < total == 8.0 < high


def test_the_unit_trains_and_reports_its_shapes(made: Callable[..., Bundle]) -> None:
    bundle = made(device=Neighboured(itertools.repeat(0.0)))
    before = steps.trained_sum(bundle.model)
    plan = plan_of(bundle, SAMPLES, 4)
    unit = Unit(bundle, 4, plan)
    assert unit.run() and unit.run()
    assert steps.trained_sum(bundle.model) != before
    assert len(unit.losses) == len(unit.grad_norms) == 4 and unit.losses[2] < unit.losses[0], "it learns"
    lengths = [bundle.data.lengths[sample] for sample in SAMPLES]
    seen = unit.timing()
    assert (seen.samples, seen.steps, seen.passes, seen.tokens) == (16, 2, 2, sum(lengths))
    assert seen.padded_tokens == sum(4 * max(lengths[at : at + 4]) for at in range(0, 16, 4)) >= seen.tokens
    assert 0 < seen.low <= seen.seconds <= seen.high and seen.clean_share == 1
    assert piece_count(unit.plan) == 6 == len(unit.pieces.clean)
    assert {len(times) for times in unit.pieces.clean.values()} == {2}


def test_a_deadline_that_has_passed_runs_nothing(made: Callable[..., Bundle]) -> None:
    bundle = made()
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    assert not unit.run(deadline=0.0) and not unit.losses and unit.passes == 0


def test_steps_beside_a_busy_neighbour_are_not_counted(
    made: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of three pieces a pass, a window each: the first step's first two timings had a neighbour."""
    monkeypatch.setattr(windows, "WINDOW_SECONDS", 0.0)
    shares = ([0.5] * 3 + [0.0] * 3, [0.5] * 3 + [0.05] * 3, [0.0] * 6)
    bundle = made(device=Neighboured(itertools.chain(*shares)))
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    unit.run()
    assert {piece[0] for piece in unit.pieces.clean} == {1} and {piece[0] for piece in unit.pieces.dirty} == {0}
    unit.run()
    assert unit.timing().clean_share == 0.5 and unit.timing().largest_share_of_others == 0.5
    unit.run()
    best = unit.pieces.best()
    assert {len(times) for piece, times in best.items() if piece[0] == 0} == {1}
    assert {len(times) for piece, times in best.items() if piece[0] == 1} == {3}


def test_a_device_that_tells_nothing_of_others_gives_an_unknown_share(made: Callable[..., Bundle]) -> None:
    bundle = made(device=Neighboured(itertools.repeat(None)))
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    time_unit(unit, passes=1)
    found = unit.timing()
    assert unit.passes == 1 and found.seconds > 0
    assert found.clean_share is None and found.largest_share_of_others is None and not found.is_disturbed


def test_a_unit_short_of_clean_timings_is_run_again_but_not_for_ever(
    made: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_SECONDS", 1000.0)
    bundle = made(device=Neighboured([0.5, 0.0]))
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    time_unit(unit, passes=1, extra=3)
    assert unit.passes == 2, "one window a pass: the second was clean"
    bundle = made(device=Neighboured(itertools.repeat(0.9)))
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    time_unit(unit, passes=1, extra=2)
    assert unit.passes == 3 and unit.timing().clean_share == 0


def test_long_steps_are_read_in_windows(made: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window for each piece, one busy window costs one piece and not the step."""
    monkeypatch.setattr(windows, "WINDOW_SECONDS", 0.0)
    bundle = made(device=Neighboured([0.0, 0.5, 0.0, 0.0, 0.0, 0.0]))
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    unit.run()
    assert list(unit.pieces.dirty) == [(0, 1)]
    assert sorted(unit.pieces.clean) == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]


class Clocked(Cpu):
    """A device with a clock of its own: every mark takes 0.2 s; it says when it was waited for and what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.seen: list[tuple[object, float]] = []

    def mark(self) -> float:
        """Later by 0.2 s."""
        self.now += 0.2
        return self.now

    def synchronize(self) -> None:
        """Noted."""
        self.seen.append(("waited", round(self.now, 1)))

    def neighbours(self) -> Any:
        """The time."""
        return (self.now, 0.0, 0.0)

    def others_share(self, first: Any, last: Any) -> float:
        """None, and noted."""
        self.seen.append((round(first[0], 1), round(last[0], 1)))
        return 0.0


def test_the_device_is_waited_for_once_a_window_and_a_short_rest_is_judged_with_the_window_before(
    made: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Clocked()
    bundle = made(device=device)
    monkeypatch.setattr(time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(windows, "WINDOW_SECONDS", 1.5)
    unit = Unit(bundle, 4, plan_of(bundle, [*SAMPLES, *SAMPLES[:8]], 4))
    device.seen.clear()
    assert unit.run()
    # Three steps of a first mark, three pieces, and the end of the wait for data: a second each.
    assert device.seen == [("waited", 2.0), (0.0, 2.0), ("waited", 3.0), (0.0, 3.0)]
    found = unit.timing()
    assert found.seconds == pytest.approx(found.token_factor * 3 * (3 + 1) * 0.2) and len(unit.losses) == 3


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes:UserWarning")  # on 2 cores
@pytest.mark.parametrize("loading", LEVERS["loading"].names)
def test_batches_are_the_same_wherever_they_are_made(made: Callable[..., Bundle], loading: str) -> None:
    bundle = made(batching="sorted", loading=loading)
    plan = plan_of(bundle, list(range(12)), micro=2, effective=4)
    expected = [steps.prepare(bundle, step) for step in plan]
    with contextlib.closing(steps.prepared(bundle, plan)) as made_batches:
        found = list(made_batches)
    assert [items for _, items, _ in found] == [items for _, items, _ in expected]
    lengths = bundle.data.lengths
    assert [tokens for *_, tokens in found] == [sum(lengths[4 * at : 4 * at + 4]) for at in range(3)]
    for (ours, *_), (theirs, *_) in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)
    assert not active_children(), "a pass over, its workers have gone"


def test_what_the_device_waits_for_data_is_counted(
    made: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of our own: making a step's batches takes a second, each of its three pieces half a one."""
    bundle = made(device=Cpu())
    clock = [0.0]
    prepare = batches.prepare

    def slowly(*args: Any) -> Any:
        clock[0] += 1.0
        return prepare(*args)

    monkeypatch.setattr(batches, "prepare", slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    marks = itertools.count()

    def mark() -> float:
        clock[0] += 0.5 * (next(marks) % 5 in (1, 2, 3))  # of a step's five, the first begins and the last ends it
        return clock[0]

    monkeypatch.setattr(bundle.device, "mark", mark)
    unit = Unit(bundle, 2, plan_of(bundle, list(range(12)), micro=2, effective=4))
    assert unit.run()
    unit._run_shapes = unit._unit_shapes  # as if a run had the same batches
    seen = unit.timing()
    assert (seen.waiting_seconds, seen.seconds) == pytest.approx((3.0, 7.5)), (
        "three steps, a wait and three pieces each"
    )

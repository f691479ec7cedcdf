"""Which micro batches are timed: none that nobody ran and for which timing has left no room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worker.trial.curve import Curve

GIB = 1 << 30


@pytest.fixture
def curve() -> Any:
    """A curve under a cap of 3 GiB, of which half a one is taken before a step."""
    made = Curve.__new__(Curve)
    made._bundle = SimpleNamespace(device=SimpleNamespace(capacity=lambda: 3 * GIB))
    made._proven, made._rest, made._timed = 4, 0.5 * GIB, {4: SimpleNamespace(peak_bytes=1.5 * GIB)}
    return made


@pytest.mark.parametrize(("size", "fits"), [(1, True), (4, True), (8, True), (10, True), (11, False), (16, False)])
def test_a_size_that_nobody_ran_needs_room_as_timing_took_it(curve: Any, size: int, fits: bool) -> None:
    assert curve._has_room(size) is fits, "a quarter of a GiB a row"


def test_two_timed_sizes_make_the_line_and_what_a_probe_ran_is_tried_anyway(curve: Any) -> None:
    curve._timed[8] = SimpleNamespace(peak_bytes=2.8 * GIB)
    assert not curve._has_room(9)
    curve._proven = 12
    assert curve._has_room(12) and not curve._has_room(13)

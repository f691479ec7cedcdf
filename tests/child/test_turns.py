"""Taking turns: a child trains the share that it is told, pauses within a step, and the slices add up to the unit."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from service.contract.child import Paused, Turn
from tests.child import tiny
from worker.child.arrange import plan_of
from worker.child.timing import Unit
from worker.child.turns import Turns

LENGTHS = [10, 20, 30, 40]
PLAN = [[[[0], [1]], [[2], [3]]]]  # a step of two micro batches: 2 x 20 and 2 x 40 padded tokens


class Orders:
    """The worker's end: a list of turns, and how often the child has paused."""

    def __init__(self, *turns: Turn) -> None:
        self.left, self.pauses = list(turns), 0

    def tell(self, message: Paused) -> None:
        self.pauses += 1

    def hear(self) -> Turn:
        return self.left.pop(0)


def test_a_turn_is_over_at_its_share_of_the_padded_tokens() -> None:
    orders = Orders(Turn(passes=0.3), Turn(passes=1, last=True))
    turns = Turns(PLAN, LENGTHS, orders.tell, orders.hear)
    assert orders.pauses == 1 and not turns.are_over
    assert turns.trained(0, 1), "40 of 120 tokens are more than 0.3"
    turns.pause()
    assert turns.number == 1 and turns.trained(0, 2) and turns.are_over
    turns.pause()
    assert orders.pauses == 2 and not orders.left, "after the last turn nothing is waited for"


def test_turns_that_are_already_trained_are_over_at_once() -> None:
    orders = Orders(*(Turn(passes=share) for share in (0.1, 0.2, 0.3, 0.5)), Turn(passes=1, last=True))
    turns = Turns(PLAN, LENGTHS, orders.tell, orders.hear)
    assert turns.trained(0, 1)
    turns.pause()
    assert turns.number == 3, "a third was trained, so the next turn with something to train is the one up to a half"
    assert turns.trained(0, 2)
    turns.pause()
    assert turns.are_over and not orders.left


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_unit_in_turns_trains_what_it_trains_alone(llama: Path, functions: Path, passes: int) -> None:
    spec, samples = tiny.job(llama, functions), list(range(16))
    alone, in_turns = tiny.bundle(spec, "lora"), tiny.bundle(spec, "lora")
    plan = plan_of(alone, samples, 2)
    unit = Unit(alone, 2, plan)
    for _ in range(passes):
        unit.run()
    orders = Orders(*(Turn(passes=passes * at / 5, last=at == 5) for at in range(1, 6)))
    other = Unit(in_turns, 2, plan)
    other.turns = Turns(plan, in_turns.data.lengths, orders.tell, orders.hear)
    while not other.turns.are_over:
        other.run()
    assert other.losses == pytest.approx(unit.losses, rel=1e-6) and other.passes == unit.passes == passes
    assert orders.pauses == 5 and not orders.left
    timed = other.timing()
    means = sum(map(statistics.fmean, other.pieces.best().values()))
    assert timed.seconds == pytest.approx(timed.token_factor * means), "a stall of one pass is the candidate's own"
    assert timed.low <= timed.seconds <= timed.high
    slices = other.slices()
    assert [one.turn for one in slices] == [0, 1, 2, 3, 4]
    total = sum(one.seconds for one in slices)
    assert total == pytest.approx(sum(one.expected for one in slices))
    pieces = (*other.pieces.clean.values(), *other.pieces.dirty.values())
    assert total == pytest.approx(sum(map(sum, pieces))), "every piece is in one turn"

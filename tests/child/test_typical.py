"""A work unit's seconds stand for those of a run, whatever the batching makes of a few samples and of all of them."""

from __future__ import annotations

import pytest

from benchmarks.unit_and_run import CURVED, DATA, MICRO, compared, made
from service.levers import LEVERS
from worker.child import typical
from worker.child.arrange import plan_of


@pytest.mark.parametrize("batching", LEVERS["batching"].names)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("curved", "most"), [(0.0, 0.03), (CURVED, 0.08)], ids=["linear", "quadratic"])
def test_the_factor_tells_a_run_from_a_unit(data: str, batching: str, curved: float, most: float) -> None:
    """Where seconds grow with tokens it is right; with a quadratic part of attention it is nearly so."""
    found = compared(data, batching, curved)
    assert abs(found.computed / found.true - 1) < most, found


def test_what_was_timed_may_not_tell_tokens_from_launches() -> None:
    """One shape alone, and shapes whose seconds fall with their tokens: the tokens decide."""
    bundle = made("padded", [10] * 3000 + [20] * 3000)
    plan = plan_of(bundle, list(range(64)), MICRO)
    unit, run = typical.Shapes(plan, bundle.data.lengths, bundle), typical.of_run(bundle, MICRO)
    for timed in ([(8, 10, 1.0)], [(8, 10, 1.0), (8, 20, 0.5)]):
        assert 1.0 < typical.token_factor(unit, run, timed, 0.0) < 1.5


def test_micro_batches_of_about_as_many_tokens_do_not_tell_a_constant_part() -> None:
    """What noise makes of two such shapes would count launches where tokens take the time."""
    bundle = made("padded", [10] * 3000 + [20] * 3000)
    plan = plan_of(bundle, list(range(64)), MICRO)
    unit, run = typical.Shapes(plan, bundle.data.lengths, bundle), typical.of_run(bundle, MICRO)
    by_tokens = typical.token_factor(unit, run, [(8, 10, 1.0)], 0.0)
    assert typical.token_factor(unit, run, [(8, 10, 1.0), (8, 14, 1.1)], 0.0) == pytest.approx(by_tokens)
    assert typical.token_factor(unit, run, [(8, 10, 1.0), (8, 20, 1.1)], 0.0) != pytest.approx(by_tokens, rel=0.02)

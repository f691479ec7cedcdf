"""What is expected of choices that a job asks for by name although they are not searched here: worker/plan/prior.py."""

from __future__ import annotations

import math
from collections.abc import Callable

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from tests.factory import configuration, measured
from tests.plan.test_surrogate import GPU, grid_of, seen
from worker.plan.grid import EFFECTIVE
from worker.plan.prior import DOUBLING, SLOWED, Prior


def expected(spec: JobSpec, facts: HardwareFacts, precision: str) -> float:
    """The expected factor on the seconds of a precision in place of the checkpoint's."""
    view = seen(spec, facts, measured(configuration()), measured(configuration(precision=precision)))
    rows = grid_of(view).encode(configuration(precision=precision))[None, :]
    return math.exp(Prior(view, grid_of(view)).expected(rows)[0])


def test_what_is_not_searched_is_expected_to_be_slower_only_where_it_is_emulated(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]
) -> None:
    """Beside native bf16, fp16 brings nothing, but it is about as fast. Where bf16 is not native, it is emulated."""
    asked = spec(search={"levers": ["precision"]})
    new, old = facts(**GPU), facts(bf16_native=False)
    assert math.isclose(expected(asked, new, "fp16-mixed"), expected(asked, new, "bf16-mixed"), rel_tol=0.1)
    assert expected(asked, new, "fp32-medium") == expected(asked, new, "tf32"), "the same arithmetic by another name"
    assert math.isclose(expected(asked, old, "bf16-mixed"), SLOWED)


def test_a_baseline_s_own_batch_is_expected_to_do_what_batches_do(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]
) -> None:
    """Although it is none of those that are searched; or the levers would be blamed for what it does."""
    view = seen(spec(), facts(**GPU), measured(configuration(effective=128)), measured(configuration(effective=32)))
    assert 128 not in view.effectives
    prior, grid = Prior(view, grid_of(view)), grid_of(view)
    large, small = (grid.encode(configuration(effective=size))[None, :] for size in (128, 32))
    assert math.isclose(prior.expected(large)[0] - prior.expected(small)[0], 2 * math.log(DOUBLING))
    column = grid.names.index(EFFECTIVE)
    assert prior.spread[column, large[0, column]] > 0 and prior.families[column, large[0, column]] > 0

"""A work unit's seconds stand for those of a run, whatever the batching makes of a few samples and of all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from service.levers import LEVERS
from tests.child import tiny
from worker.child import typical
from worker.child.arrange import plan_of, shape_of
from worker.child.build import Bundle
from worker.child.data import work_unit

EFFECTIVE, MICRO, LONGEST = 16, 8, 256


def rare(rng: random.Random) -> list[int]:
    """Two rows in a thousand are cut at the longest length."""
    return [LONGEST if at % 500 == 7 else rng.randrange(8, 38) for at in range(6000)]


def heavy(rng: random.Random) -> list[int]:
    """Lengths with a heavy tail."""
    return [min(LONGEST, int(3 + 8 * rng.paretovariate(1.3))) for _ in range(6000)]


@pytest.fixture
def bundle_of(llama: Any, functions: Any) -> Callable[..., Bundle]:
    """A bundle with these lengths, of whose samples nothing is trained."""

    def make(batching: str, lengths: list[int]) -> Bundle:
        bundle = tiny.bundle(tiny.job(llama, functions, max_length=LONGEST), effective=EFFECTIVE, batching=batching)
        bundle.data = SimpleNamespace(lengths=lengths, typical=lengths)  # type: ignore[assignment]
        return bundle

    return make


def seconds(bundle: Bundle, plan: list[Any], curved: float) -> tuple[float, list[tuple[int, int, float]], int]:
    """(a plan's seconds by a cost that is known, each micro batch with its own, its tokens without padding)."""
    lengths, timed = bundle.data.lengths, []
    for step in plan:
        for micro in step:
            rows, width = shape_of(micro, lengths, bundle.recipe)
            timed.append((rows, width, 3e-3 + 1e-4 * rows * width + curved * rows * width**2))
    tokens = sum(lengths[one] for step in plan for micro in step for row in micro for one in row)
    return sum(one[2] for one in timed) + 1e-2 * len(plan), timed, tokens


@pytest.mark.parametrize("batching", LEVERS["batching"].names)
@pytest.mark.parametrize("data", [rare, heavy])
def test_the_factor_tells_a_run_from_a_unit(
    bundle_of: Callable[..., Bundle], batching: str, data: Callable[[random.Random], list[int]]
) -> None:
    """Where seconds grow with tokens it tells exactly; where attention counts as well, it is nearer than without."""
    bundle = bundle_of(batching, data(random.Random(1)))
    lengths = bundle.data.lengths
    plan = plan_of(bundle, work_unit(lengths, 64, 1, EFFECTIVE), MICRO)
    run = [step for seed in range(3) for step in plan_of(bundle, random.Random(seed).sample(range(6000), 6000), MICRO)]
    for curved, most in ((0.0, 0.03), (1e-7, 0.08)):
        (ours, timed, tokens), (theirs, _, of_run) = seconds(bundle, plan, curved), seconds(bundle, run, curved)
        unit = typical.Shapes(plan, lengths, bundle)
        factor = typical.token_factor(unit, typical.of_run(bundle, MICRO), timed, 1e-2)
        truth = (theirs / of_run) / (ours / tokens)
        assert abs(factor / truth - 1) < most, (factor, truth)


def test_what_was_timed_may_not_tell_tokens_from_launches(bundle_of: Callable[..., Bundle]) -> None:
    """One shape alone, and shapes whose seconds fall with their tokens: the tokens decide."""
    bundle = bundle_of("padded", [10] * 3000 + [20] * 3000)
    plan = plan_of(bundle, list(range(64)), MICRO)
    unit, run = typical.Shapes(plan, bundle.data.lengths, bundle), typical.of_run(bundle, MICRO)
    for timed in ([(8, 10, 1.0)], [(8, 10, 1.0), (8, 20, 0.5)]):
        assert 1.0 < typical.token_factor(unit, run, timed, 0.0) < 1.5

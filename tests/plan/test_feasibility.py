"""How likely a configuration runs, after another one ran out of memory: worker/plan/feasibility.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, MemoryLine, Probe
from service.contract.task import PlanInput
from tests.factory import configuration, failed, measured, record
from worker.plan.feasibility import Feasibility
from worker.plan.grid import Grid, Rows
from worker.plan.view import View, was_given_too_much

GIB = 1 << 30
CAPACITY = 10 * GIB
RAN = configuration()
FAILED = configuration(optimizer="adamw-8bit")
SMALLER = configuration(optimizer="adamw-8bit", checkpointing="full")  # has what failed, and takes far less memory
COMPILED = configuration(optimizer="adamw-8bit", compile="per-layer")  # keeps somewhat fewer activations
LIKE_RAN = configuration(padding="multiple-8")  # differs by a choice that holds no memory from what ran


@pytest.fixture
def chances(spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]) -> Callable[[float], list[float]]:
    """The chances of FAILED, SMALLER, COMPILED and LIKE_RAN, where RAN took so many GiB and FAILED did not fit."""

    def of(gib: float) -> list[float]:
        line = MemoryLine(rest_bytes=GIB, slope_bytes=(gib - 1) * GIB, residual=0.0)
        ran = measured(RAN, memory_line=line, capacity_bytes=CAPACITY, peak_bytes=int(gib * GIB))
        known = PlanInput(spec=spec(), facts=facts(), history=(record(ran), record(failed(FAILED), number=2)))
        view = View(known, "lora")
        grid = Grid(known.spec, "lora", view.choices, view.effectives, [RAN, FAILED, SMALLER, COMPILED, LIKE_RAN])
        rows = np.array([grid.encode(one) for one in (FAILED, SMALLER, COMPILED, LIKE_RAN)])
        found: list[float] = Feasibility(view, grid).chance(rows).tolist()
        return found

    return of


def test_a_failure_near_the_limit_tells_little_of_what_takes_far_less(chances: Callable[[float], list[float]]) -> None:
    """Memory was short, so a configuration that saves much of it is likely to fit."""
    again, smaller, *_ = chances(9.8)
    assert again < 0.5 and smaller > 0.8


def test_a_failure_far_below_the_limit_has_another_cause(chances: Callable[[float], list[float]]) -> None:
    """A choice of it is to blame, which a configuration that takes less memory has as well."""
    again, smaller, *_ = chances(2.0)
    assert again < 0.5 and smaller < 0.5


def test_what_failed_uncompiled_may_fit_compiled(chances: Callable[[float], list[float]]) -> None:
    """Compiled code computes cheap activations again, so little that is lacking may be saved by it."""
    again, _, compiled, _ = chances(9.8)
    assert again < 0.15 and compiled > 0.2


def test_what_is_like_a_trial_that_ran_is_judged_by_what_that_took(chances: Callable[[float], list[float]]) -> None:
    """By the catalogue it saves no more memory than what failed, but it differs by one choice from what fits well."""
    *_, like_ran = chances(8.0)
    assert like_ran > 0.6


def test_only_what_was_given_its_micro_batch_was_given_too_much() -> None:
    """A trial that looked for its own, and found none of a few sizes safe, tells that memory is short."""
    sizes = tuple(Probe(micro_batch_size=size, peak_bytes=None) for size in (16, 8, 4, 2))
    assert was_given_too_much(failed(configuration(micro=16), probes=sizes))
    assert not was_given_too_much(failed(configuration(), probes=sizes))


def judged(
    spec: JobSpec, facts: HardwareFacts, trials: list[Measurement], *asked: Configuration
) -> tuple[Feasibility, Rows]:
    """(what these trials tell, the rows of what is asked)."""
    records = tuple(record(one, number=number) for number, one in enumerate(trials, 1))
    view = View(PlanInput(spec=spec, facts=facts, history=records, next_number=len(records) + 1), "lora")
    grid = Grid(spec, "lora", view.choices, view.effectives, [*(one.configuration for one in trials), *asked])
    return Feasibility(view, grid), np.array([grid.encode(one) for one in asked])


def ran(gib: float, **changes: Any) -> Measurement:
    """A trial whose micro batch of 1 took so many GiB, of which one does not grow with it."""
    line = MemoryLine(rest_bytes=GIB, slope_bytes=(gib - 1) * GIB, residual=0.0)
    told: dict[str, Any] = {"memory_line": line, "capacity_bytes": CAPACITY, "peak_bytes": int(gib * GIB)}
    return measured(RAN, **(told | changes))


def test_two_failures_rule_out_what_needs_no_less_memory_and_one_does_not(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]
) -> None:
    """One may have a cause of its own. What was given its micro batch may fit at a smaller one, so it tells nothing."""
    tried = [configuration(checkpointing="full"), configuration(checkpointing="full", batching="sorted")]
    asked = (configuration(batching="grouped"), configuration(checkpointing="full", optimizer="adamw-8bit"))

    def impossible(*trials: Measurement) -> list[bool]:
        found, rows = judged(spec(), facts(), list(trials), *asked)
        ruled_out: list[bool] = found.impossible(rows).tolist()
        return ruled_out

    assert impossible(*map(failed, tried)) == [True, False], "the second takes less for the optimizer"
    assert impossible(failed(tried[0])) == [False, False]
    large = [one.model_copy(update={"micro_batch_size": 16}) for one in tried]
    assert impossible(*map(failed, large)) == [False, False]


@pytest.mark.parametrize(
    ("gib", "told", "memory", "cap", "ruled_out"),
    [
        (15.0, 10, 64, None, False),
        (17.0, 10, 64, None, True),
        (17.0, None, 10, None, True),
        (17.0, None, 64, None, False),
        (17.0, None, 64, 10, True),
        (17.0, None, 10, 64, True),
    ],
)
def test_what_a_line_puts_far_over_the_memory_is_ruled_out(
    spec: Callable[..., JobSpec],
    facts: Callable[..., HardwareFacts],
    gib: float,
    told: int | None,
    memory: int,
    cap: int | None,
    ruled_out: bool,
) -> None:
    """By half may be an error of the catalogue's. The memory is what a trial told, or the device's up to the cap."""
    job, took = spec(hardware={"memory_gib": cap}), ran(gib, capacity_bytes=told and told * GIB)
    found, rows = judged(job, facts(memory_bytes=memory * GIB), [took], LIKE_RAN)
    assert found.impossible(rows).tolist() == [ruled_out]


def test_where_most_ran_out_of_memory_nothing_is_ruled_out(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]
) -> None:
    """The catalogue's factors have to be wrong there, or the search would end with nothing that fits."""
    batchings = ("sorted", "grouped", "token-budget", "packed")
    tried = [failed(configuration(checkpointing="full", batching=one)) for one in batchings]
    for trials, learns in ((tried, True), (tried[:3], False), ([ran(9.0), measured(SMALLER), *tried], False)):
        found, rows = judged(spec(), facts(), trials, configuration())
        assert found.learns is learns
        assert not (learns and found.impossible(rows).any())
    found, rows = judged(spec(), facts(), tried[:3], configuration(padding="multiple-8"))
    assert found.impossible(rows).all()

"""What a failure for want of memory tells of other configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import MemoryLine, Outcome
from service.contract.states import Origin
from service.contract.task import PlanInput, TrialRecord, TrialRequest
from tests.factory import configuration, failed, measured
from worker.plan.feasibility import Feasibility
from worker.plan.grid import Grid
from worker.plan.view import View

GIB = 1 << 30


def chances(
    spec: JobSpec, facts: HardwareFacts, history: list[Any], asked: list[Configuration]
) -> tuple[list[float], list[float]]:
    """(the chances of the configurations, how likely each failure was for want of memory)."""
    records = tuple(
        TrialRecord(
            request=TrialRequest(configuration=one.configuration, origin=Origin.search, number=number),
            measurement=one,
        )
        for number, one in enumerate(history)
    )
    view = View(PlanInput(spec=spec, facts=facts, history=records), "lora")
    seen = [*(one.configuration for one in history), *asked]
    grid = Grid(spec, "lora", view.choices, view.effectives, seen)
    found = Feasibility(view, grid)
    return found.chance(np.array([grid.encode(one) for one in asked])).tolist(), found._short.tolist()


@pytest.mark.parametrize(("gib", "memory"), [(9.8, True), (2.0, False)], ids=["nearly full", "half empty"])
def test_a_failure_near_the_limit_is_memory_s_and_tells_little_of_what_takes_less(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts], gib: float, memory: bool
) -> None:
    line = MemoryLine(rest_bytes=GIB, slope_bytes=gib * GIB - GIB, residual=0.0)
    ran = measured(configuration("lora")).model_copy(
        update={"memory_line": line, "capacity_bytes": 10 * GIB, "peak_bytes": int(gib * GIB)}
    )
    short = failed(configuration("lora", optimizer="adamw-8bit"), Outcome.infeasible, "out of memory")
    less = configuration("lora", checkpointing="full", optimizer="adamw-8bit")
    (again, saved), blame = chances(spec(), facts(), [ran, short], [short.configuration, less])
    assert (blame[0] > 0.9) is memory
    assert saved > again
    if memory:
        assert saved > 0.6, "it takes far less than what failed"
    else:
        assert saved < 0.5, "another cause is likelier, which it has as well"

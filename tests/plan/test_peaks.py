"""What failures tell of memory, where most trials run out of it (worker/plan/peaks.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, MemoryLine, Outcome
from service.contract.task import PlanInput, TrialRecord
from service.levers import chosen
from tests.factory import configuration, failed, measured
from tests.plan.test_surrogate import GPU, grid_of, seen
from worker.plan import plan
from worker.plan.memory_needs import memory_tables
from worker.plan.peaks import PeakModel

GIB = 1 << 30
CAPACITY = 24 * GIB
Fits = Callable[..., list[float]]


@pytest.fixture
def fits(spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]) -> Fits:
    """The probabilities that the asked fit, by these trials."""

    def of(trials: list[Measurement], *asked: Configuration) -> list[float]:
        view = seen(spec(), facts(**GPU), *trials, *map(measured, asked))
        grid = grid_of(view)
        ran = [one for one in trials if one.outcome is Outcome.ok]
        lacking = [one for one in trials if one.outcome is not Outcome.ok]
        peaks = PeakModel(grid, memory_tables(view, grid), ran, lacking, CAPACITY)
        found: list[float] = peaks.fits(np.array([grid.encode(one) for one in asked])).tolist()
        return found

    return of


def ran(gib: float, **choices: Any) -> Measurement:
    """A trial whose micro batch of 1 takes so many GiB, of which one does not grow with it."""
    line = MemoryLine(rest_bytes=GIB, slope_bytes=(gib - 1) * GIB)
    return measured(configuration(**choices), memory_line=line, capacity_bytes=CAPACITY)


def test_a_line_corrects_what_the_catalogue_says_of_its_choices(fits: Fits) -> None:
    """The catalogue takes checkpointing to save most activations; a line that tells otherwise counts for others."""
    other, reference = configuration(checkpointing="full", optimizer="adamw-8bit"), ran(40.0, attention="varlen")
    (expected,) = fits([reference], other)
    (corrected,) = fits([ran(38.0, checkpointing="full"), reference], other)
    assert expected > 0.65 and corrected < 0.2


def test_what_all_that_ran_out_have_in_common_is_avoided(fits: Fits) -> None:
    """One batching ran, and all trials of another ran out of memory, though they were expected to fit."""
    tried: list[dict[str, Any]] = [
        {},
        {"precision": "bf16-mixed"},
        {"checkpointing": "full"},
        {"optimizer": "adamw-8bit"},
    ]
    lacking = [failed(configuration(batching="padding-free", **one)) for one in tried]
    changes: dict[str, Any] = {"precision": "bf16-mixed", "optimizer": "adamw-8bit"}
    asked = [configuration(batching=one, **changes) for one in ("token-budget", "padding-free")]
    same, blamed = fits([ran(22.0, batching="token-budget"), *lacking], *asked)
    assert same > 0.5 and blamed < 0.4 * same


def test_where_nothing_fits_what_was_not_tried_is_likelier_to(fits: Fits) -> None:
    """After ten failures with one batching, another one is: nobody knows of it that it needs as much."""
    savers = ("full", "selective", "every-2", "offloaded", "every-4")
    lacking = [
        failed(configuration(batching="packed", checkpointing=one, precision=precision))
        for one in savers
        for precision in ("bf16-mixed", "bf16-mixed-uncached")
    ]
    changes: dict[str, Any] = {"checkpointing": "full", "precision": "fp16-mixed"}
    packed, other = fits(lacking, *(configuration(batching=one, **changes) for one in ("packed", "token-budget")))
    assert other > 1.5 * packed


def test_what_fits_is_found_where_only_choices_of_which_nobody_expects_it_save_enough(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]
) -> None:
    """A micro batch fits with one attention and one batching only. All thirty trials of such a job once ran out."""
    job = spec(search={"trials": 30, "minutes": 6000})
    records: list[TrialRecord] = []
    while len(records) < 30:
        known = PlanInput(spec=job, facts=facts(**GPU), history=tuple(records), next_number=len(records) + 1)
        request = plan(known).trials[0]
        levers = request.configuration.levers
        kept = math.prod(choice.memory.kept(False) for choice in chosen(levers))
        enough = levers["attention"] == "sdpa-cudnn" and levers["batching"] == "padded" and kept < 0.1
        made = measured(request.configuration) if enough else failed(request.configuration)
        records.append(TrialRecord(request=request, measurement=made))
        if enough:
            return
    raise AssertionError("nothing that fits was found")

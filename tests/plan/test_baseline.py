"""The baseline: of arguments that the hardware cannot run, and beside choices that the job fixes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.states import Origin
from tests.factory import measured, record
from tests.plan.test_plan import known
from worker.plan import plan
from worker.plan.proposers.ablation import pending
from worker.plan.view import View


def test_what_the_hardware_cannot_run_is_told_and_the_baseline_measured_without_it(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]
) -> None:
    """Trainer refuses fp16 on a CPU, so there is no such run to be faster than."""
    decision = plan(known(spec(baseline={"fp16": True}), facts()))
    (request,) = decision.trials
    assert request.configuration.levers["precision"] == "checkpoint"
    said = "The baseline has precision=checkpoint, as precision=fp16-mixed needs an NVIDIA GPU with CUDA"
    assert any(note.startswith(said) for note in decision.notes)


@pytest.mark.parametrize(("fixed", "asked"), [({"precision": "fp32"}, True), ({}, False)])
def test_a_quick_search_measures_what_is_fixed_without_the_only_other_lever(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts], fixed: dict[str, str], asked: bool
) -> None:
    """The baseline lacks what is fixed and is no answer, so a lever that does nothing would be recommended."""
    job = spec(search={"verify": "quick", "levers": ["batching"], "fixed": fixed, "trials": 9})
    (first,) = plan(known(job, facts())).trials
    best = first.configuration.model_copy(
        update={"levers": first.configuration.levers | fixed | {"batching": "grouped"}, "micro_batch_size": None}
    )
    ran = (record(measured(first.configuration, 10.0), Origin.baseline), record(measured(best, 9.0)))
    view = View(known(job, facts(), ran), "lora")
    wanted = best.model_copy(update={"levers": best.levers | {"batching": first.configuration.levers["batching"]}})
    assert pending(view) == ([wanted] if asked else [])

"""The baseline of a user's own arguments, where the hardware cannot run them."""

from __future__ import annotations

from collections.abc import Callable

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from tests.plan.test_plan import known
from worker.plan import plan


def test_what_the_hardware_cannot_run_is_told_and_the_baseline_measured_without_it(
    spec: Callable[..., JobSpec], facts: Callable[..., HardwareFacts]
) -> None:
    """Trainer refuses fp16 on a CPU, so there is no such run to be faster than."""
    decision = plan(known(spec(baseline={"fp16": True}), facts()))
    (request,) = decision.trials
    assert request.configuration.levers["precision"] == "checkpoint"
    said = "The baseline has precision=checkpoint, as precision=fp16-mixed needs an NVIDIA GPU with CUDA"
    assert any(note.startswith(said) for note in decision.notes)

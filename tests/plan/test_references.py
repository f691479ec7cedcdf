"""What a candidate is compared with in a verification."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.levers.optimizer import WHOLE_STEP
from tests.factory import configuration, measured
from worker.plan.proof import CLIPPED_TO, exposed, references_of

GPU = {"device": "cuda", "capability": (9, 0), "has_own_memory": True, "bf16_native": True}


def precisions(facts: HardwareFacts, levers: dict[str, str], dtype: str, parameters: int = 10**9) -> list[str]:
    candidate = measured(
        configuration("lora", 8, None, **levers), micro_batch_size=2, parameters=parameters, weights_dtype=dtype
    )
    return [one.configuration.levers["precision"] for _, one in references_of(candidate, facts)]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "float32"), ("fp16-mixed", "float32"), ("checkpoint", "bfloat16")]
)
def test_a_gpu_compares_16_bits_with_tf32(facts: Callable[..., HardwareFacts], precision: str, dtype: str) -> None:
    levers = {"precision": precision}
    assert precisions(facts(**GPU), levers, dtype) == ["tf32", precision]
    assert precisions(facts(**GPU | {"capability": (7, 5)}), levers, dtype) == ["fp32", precision]
    assert precisions(facts(), levers, dtype) == ["fp32", precision]


@pytest.mark.parametrize(
    "levers",
    [
        {"precision": "fp32"},
        {"precision": "fp32", "kernels": "liger"},
        {"precision": "tf32"},
        {"precision": "checkpoint"},
    ],
)
def test_full_precision_is_compared_with_full_precision(
    facts: Callable[..., HardwareFacts], levers: dict[str, str]
) -> None:
    """Also where a kernel rounds otherwise: TF32 would round more than it does."""
    assert precisions(facts(**GPU), levers, "float32") == ["fp32", levers["precision"]]


def test_a_large_model_has_a_reference_in_its_own_precision(facts: Callable[..., HardwareFacts]) -> None:
    assert precisions(facts(**GPU), {"precision": "bf16-mixed"}, "float32", 8 * 10**9) == ["bf16-mixed"]


def test_what_is_off_stays_off_in_a_replay(spec: Callable[..., JobSpec]) -> None:
    """A decay or a clipping that the job does not have may be what the optimizer lacks."""
    candidate = measured(configuration("full", 8, None), micro_batch_size=2, check_grad_norm=3.0)
    seen = exposed(spec(training={"weight_decay": 0.01, "max_grad_norm": 1.0}), candidate).training
    assert seen.weight_decay > 0.01 and seen.max_grad_norm == CLIPPED_TO * 3.0
    off = exposed(spec(training={"weight_decay": 0.0, "max_grad_norm": 0.0}), candidate).training
    assert off.weight_decay == 0.0 and off.max_grad_norm == 0.0
    levers = candidate.configuration.levers | {"optimizer": WHOLE_STEP[0]}
    whole = candidate.model_copy(
        update={"configuration": candidate.configuration.model_copy(update={"levers": levers})}
    )
    assert exposed(spec(training={"max_grad_norm": 1.0}), whole).training.max_grad_norm == 1.0

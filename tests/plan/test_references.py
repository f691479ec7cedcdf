"""What a candidate is compared with in a verification."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.contract.hardware import HardwareFacts
from tests.factory import configuration, measured
from worker.plan.proof import references_of

GPU = {"device": "cuda", "capability": (9, 0), "has_own_memory": True, "bf16_native": True}


def precisions(
    facts: HardwareFacts, precision: str, parameters: int = 10**9, dtype: str = "float32", **levers: str
) -> list[str]:
    made = configuration("lora", 8, precision=precision, **levers)
    candidate = measured(made, micro_batch_size=2, parameters=parameters, weights_dtype=dtype)
    return [one.configuration.levers["precision"] for _, one in references_of(candidate, facts)]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "float32"), ("fp16-mixed", "float32"), ("checkpoint", "bfloat16")]
)
def test_a_gpu_compares_what_rounds_with_tf32(facts: Callable[..., HardwareFacts], precision: str, dtype: str) -> None:
    assert precisions(facts(**GPU), precision, dtype=dtype) == ["tf32", precision]
    assert precisions(facts(**GPU | {"capability": (7, 5)}), precision, dtype=dtype) == ["fp32", precision]
    assert precisions(facts(), precision, dtype=dtype) == ["fp32", precision]


@pytest.mark.parametrize(
    ("precision", "levers"), [("fp32", {}), ("fp32", {"kernels": "liger"}), ("tf32", {}), ("checkpoint", {})]
)
def test_full_precision_is_compared_with_full_precision(
    facts: Callable[..., HardwareFacts], precision: str, levers: dict[str, str]
) -> None:
    """Also where a kernel rounds otherwise: TF32 would round more than it does."""
    assert precisions(facts(**GPU), precision, **levers) == ["fp32", precision]


def test_a_large_model_has_a_reference_in_its_own_precision(facts: Callable[..., HardwareFacts]) -> None:
    assert precisions(facts(**GPU), "bf16-mixed", parameters=8 * 10**9) == ["bf16-mixed"]

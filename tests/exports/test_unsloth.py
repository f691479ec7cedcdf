"""The script for Unsloth: values that its loader takes, and data read as they were measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from service.contract.hardware import HardwareFacts
from service.exports import EXPORTS
from service.levers import LEVERS
from tests.exports.test_targets import METHODS, constants, made

Facts = Callable[..., HardwareFacts]


@pytest.mark.parametrize("method", METHODS)
def test_the_dtype_is_one_that_the_loader_takes(method: str, facts: Facts) -> None:
    """It asserts these; names as text it turns into them in some precisions only, and never in full finetuning."""
    for precision in LEVERS["precision"].names:
        text = EXPORTS["unsloth"].write(made(facts, method, precision=precision))
        dtype = constants(text)["LOAD"]["dtype"]
        assert (dtype is None) is (precision == "checkpoint")
        assert dtype in (None, torch.float16, torch.bfloat16, torch.float32), precision
        assert ("\nimport torch\n" in text) is (dtype is not None)

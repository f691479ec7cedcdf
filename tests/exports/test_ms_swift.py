"""ms-swift's file holds what its reader and its parser take: nothing that is null, and dtypes by torch's names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml

from service.contract.hardware import HardwareFacts
from service.errors import NotYet
from service.exports import EXPORTS
from tests.exports.test_targets import METHODS, made, points

Facts = Callable[..., HardwareFacts]


def test_a_pattern_of_modules_is_no_name(facts: Facts) -> None:
    """In a list of names it would match none; LLaMA-Factory has no key for it."""
    usual = made(facts, "lora")
    adapter = (usual.LoraConfig or {}) | {"target_modules": ".*(q|v)_proj"}
    found = usual.model_copy(update={"LoraConfig": adapter})
    written = yaml.safe_load(EXPORTS["ms-swift"].write(found))
    assert written["target_regex"] == ".*(q|v)_proj" and "target_modules" not in written
    with pytest.raises(NotYet, match="is a regular expression"):
        EXPORTS["llamafactory"].write(found)


@pytest.mark.parametrize("method", METHODS)
def test_no_value_is_null(method: str, facts: Facts) -> None:
    """swift's reader makes the text `None` of it, which a parser of numbers and choices refuses."""
    usual = made(facts, method)
    chosen = usual.configuration
    for point in points(method):
        changed = chosen.model_copy(update={"levers": chosen.levers | point})
        written = yaml.safe_load(EXPORTS["ms-swift"].write(usual.model_copy(update={"configuration": changed})))
        assert [key for key, value in written.items() if value is None] == [], point
        assert written["lora_dtype"] in ("float32", "bfloat16"), point


def test_adam_averages_squares_as_it_was_measured(facts: Facts) -> None:
    """Unset, its beta2 is 0.95, where transformers and torch have 0.999."""
    assert yaml.safe_load(EXPORTS["ms-swift"].write(made(facts)))["adam_beta2"] == 0.999
    assert yaml.safe_load(EXPORTS["ms-swift"].write(made(facts, optimizer="lion")))["adam_beta2"] == 0.99

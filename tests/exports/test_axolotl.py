"""What Axolotl makes of its file where that is not what a reader of its keys would expect."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from service.contract.recommendation import Recommendation
from service.exports import EXPORTS, axolotl
from tests.exports.test_targets import METHODS, Facts, made, reading
from tests.exports.test_trainers_data import told


def written(found: Recommendation) -> dict[str, Any]:
    """The keys of the file."""
    keys: dict[str, Any] = yaml.safe_load(EXPORTS["axolotl"].write(found))
    return keys


def verdict(found: Recommendation, lever: str) -> str:
    """How it says the lever's choice."""
    return axolotl.TARGET.spoken(found)[lever].verdict


@pytest.mark.parametrize("method", METHODS)
def test_full_finetuning_in_fp16_is_not_asked_for(method: str, facts: Facts) -> None:
    """It loads weights in fp16, and the scaler ends the training: Attempting to unscale FP16 gradients."""
    found = made(facts, method, precision="fp16-mixed", head="cut-cross-entropy")
    whole = method == "full"
    assert (written(found)["fp16"], written(found)["float32"]) == (not whole, whole)
    assert verdict(found, "precision") == verdict(found, "head") == ("cannot" if whole else "says")
    assert verdict(made(facts, method, precision="bf16-mixed", head="cut-cross-entropy"), "head") == "says"


def test_bf16_weights_come_with_autocast(facts: Facts) -> None:
    assert verdict(made(facts, precision="bf16"), "precision") == "nearest"


@pytest.mark.parametrize("precision", ["checkpoint", "fp32", "tf32", "fp32-medium"])
def test_a_base_of_8_bits_has_fp16_around_it(precision: str, facts: Facts) -> None:
    """Axolotl looks at the 8 bits before it looks at float32."""
    for method, quantization, expected in (
        ("qlora", "int8", True),
        ("qlora", "torchao-float8", True),
        ("qlora", "nf4", False),
        ("lora", "int8", False),
    ):
        found = made(facts, method, precision=precision, quantization=quantization)
        assert ("what is not quantised is loaded in fp16" in told("axolotl", found)) is expected, (method, quantization)
    assert verdict(made(facts, "qlora", precision="bf16-mixed", quantization="int8"), "precision") == "says"


def test_texts_that_it_splits_are_told(facts: Facts) -> None:
    found = reading(made(facts), ("text",))
    assert "are split, not cut" in told("axolotl", found)
    assert found.dataset is not None
    short = found.model_copy(update={"dataset": found.dataset.model_copy(update={"at_max_length": 0})})
    assert "split, not cut" not in told("axolotl", short)
    assert "split, not cut" not in told("axolotl", made(facts)), "prompts and completions are cut"


def test_a_column_of_the_data_is_no_system_prompt(facts: Facts) -> None:
    (dataset,) = written(made(facts))["datasets"]
    assert dataset["type"]["field_system"] == "no such column"
    assert "a column 'system'" in told("axolotl", reading(made(facts), ("messages",))), "no key names another"


def test_a_run_of_one_epoch_is_evaluated(facts: Facts) -> None:
    """Of evals_per_epoch it makes a share of all steps, which it takes only if it is below 1."""
    found = made(facts)
    assert written(found)["eval_strategy"] == "epoch" and "evals_per_epoch" not in written(found)
    training = found.spec["training"] | {"evaluation_steps": 50}
    often = written(found.model_copy(update={"spec": found.spec | {"training": training}}))
    assert often["eval_steps"] == 50 and "eval_strategy" not in often

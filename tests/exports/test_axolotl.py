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


def test_an_optimizer_of_torchdistx_has_a_folder_to_look_in(facts: Facts) -> None:
    """It asks whether the folder exists, and Path(None) is an error of types."""
    assert written(made(facts, optimizer="anyprecision"))["torchdistx_path"] == "."


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_padded_to_a_multiple_where_the_switch_is_unset(packed: bool, facts: Facts) -> None:
    """Off, its collator pads to the longest row whatever the multiple; where it packs, unset becomes on."""
    batching = "packed-global" if packed else "padded"
    found = made(facts, batching=batching, attention="flash-attention-2", padding="multiple-8")
    keys = written(found)
    assert (keys["pad_to_sequence_len"], keys["pad_to_multiple_of"]) == ((False, None) if packed else (None, 8))
    assert verdict(found, "padding") == ("nearest" if packed else "says")
    longest = written(made(facts, padding="max"))
    assert (longest["pad_to_sequence_len"], longest["pad_to_multiple_of"]) == (True, 1)


def test_no_row_of_an_evaluation_is_dropped_where_it_packs(facts: Facts) -> None:
    assert written(made(facts, batching="packed-global"))["dataloader_drop_last"] is False


def test_lora_kernels_are_not_asked_for_with_a_model_s_own_code(facts: Facts) -> None:
    found = made(facts, projections="fused")
    measurement = found.evidence.measurement.model_copy(update={"remote_code": True})
    remote = found.model_copy(update={"evidence": found.evidence.model_copy(update={"measurement": measurement})})
    assert [written(one)["lora_qkv_kernel"] for one in (found, remote)] == [True, False]
    assert verdict(remote, "projections") == "cannot"


def test_what_it_learns_of_turns_is_told(facts: Facts) -> None:
    chats = reading(made(facts), ("messages",))
    assert "eot_tokens" in told("axolotl", chats) and "eot_tokens" not in told("axolotl", made(facts))
    every = chats.spec | {"training": chats.spec["training"] | {"loss_on": "all"}}
    everything = told("axolotl", chats.model_copy(update={"spec": every}))
    assert "eot_tokens" not in everything and "neither the names of the roles" in everything


def test_means_of_means_are_told_where_a_step_has_several_micro_batches(facts: Facts) -> None:
    found = made(facts)
    assert "mean of its micro batches' means" in told("axolotl", found)
    once = found.configuration.model_copy(update={"micro_batch_size": found.configuration.effective_batch_size})
    assert "micro batches' means" not in told("axolotl", found.model_copy(update={"configuration": once}))

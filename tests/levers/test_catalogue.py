"""What a lever declares about itself is consistent, and is all that the search and the estimates know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from service.contract.hardware import HardwareFacts, Package
from service.levers import LEVERS, METHOD_NEEDS, chosen, excluded, is_compiled, of_task, packages
from service.levers.batching import PACKED
from service.tasks import TASKS
from tests.exports.test_targets import known
from tests.factory import configuration

Facts = Callable[..., HardwareFacts]
ARGUMENTS = known("transformers", "TrainingArguments")
# What users' baselines may name beside them: an argument of transformers before 5, and one of from_pretrained.
BESIDE = {"group_by_length", "attn_implementation"}


@pytest.mark.parametrize("name", LEVERS)
def test_what_a_choice_says_to_trainer_are_arguments_that_it_has(name: str) -> None:
    """A misspelt one would ask for nothing in a user's baseline; transformers refuses it in an export."""
    for choice in LEVERS[name].choices:
        assert {argument for asked in choice.asked_by for argument in asked.arguments} <= ARGUMENTS | BESIDE, choice
        assert set(choice.training_arguments) <= ARGUMENTS, choice


@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm", "causal-lm"])
def test_what_a_task_declares_decides_on_packing_and_not_its_name(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a second task with one label a row would get rows of several samples."""
    monkeypatch.setitem(TASKS, "new", replace(TASKS[task], name="new"))
    for batching in PACKED:
        for attention in ("eager", "varlen"):
            levers = {"batching": batching, "attention": attention}
            assert excluded(levers | of_task("new")) is excluded(levers | of_task(task))
    assert (excluded({"batching": "packed"} | of_task("new")) is not None) is (task == "sequence-classification")


def test_levers_are_in_their_order_and_of_equal_ones_by_name() -> None:
    assert [*LEVERS] == sorted(LEVERS, key=lambda name: (LEVERS[name].order, name))


def test_estimates_rank_choices_by_the_device(facts: Facts) -> None:
    gpu = facts(device="cuda", capability=(9, 0), bf16_native=True)
    assert LEVERS["precision"].ranked(facts()) == ("fp32",), "emulated bf16 is not ranked"
    assert LEVERS["precision"].ranked(gpu) == ("bf16-mixed", "tf32", "fp32")
    older = facts(device="cuda", capability=(7, 5), bf16_native=False)
    assert LEVERS["precision"].ranked(older) == ("fp16-mixed", "fp32")


def test_a_choice_for_one_kind_of_device_is_barred_on_the_others() -> None:
    tf32 = LEVERS["precision"].choice("tf32")
    assert tf32.barred("cpu") and not tf32.barred("cuda") and not tf32.barred("auto")
    assert LEVERS["optimizer"].choice("paged-adamw-8bit").barred("cpu")
    assert not LEVERS["precision"].choice("fp32").barred("cpu")


def test_no_option_has_the_name_that_printing_takes_away() -> None:
    """A printed function loses its parameter `recipe`, of which all is decided then: fp8's script could not run."""
    assert not [one.name for lever in LEVERS.values() for one in lever.choices if "recipe" in one.options]


def test_packages_are_known_by_what_needs_them() -> None:
    found = packages()
    assert found["flash_attn"] == ["attention=flash-attention-2"] and found["apex"]
    assert found["bitsandbytes"][0] == "method qlora" and set(METHOD_NEEDS) >= {"qlora"}


def test_another_package_will_do(facts: Facts) -> None:
    """transformers takes FlashAttention from the hub where the package itself is not installed."""
    hopper = {"device": "cuda", "capability": (9, 0), "bf16_native": True}
    for name in ("flash-attention-2", "flash-attention-3"):
        choice = LEVERS["attention"].choice(name)
        assert "or kernels" in (choice.missing(facts(**hopper)) or "")
        assert choice.missing(facts(**hopper, packages={"kernels": Package(version="1")})) is None


def test_facts_of_an_earlier_version_still_parse(facts: Facts) -> None:
    old: dict[str, Any] = facts(packages={"peft": Package(version="1")}).model_dump(exclude={"has_own_memory"})
    assert not HardwareFacts.model_validate(old).has_own_memory
    assert HardwareFacts.model_validate(old | {"device": "cuda", "capability": (8, 0)}).has_own_memory


def test_only_compiled_code_counts_as_compiled() -> None:
    assert not is_compiled(configuration().levers) and is_compiled(configuration(compile="per-layer").levers)
    assert [choice.name for choice in chosen({"head": "chunked", "padding": "max"})] == ["chunked", "max"]

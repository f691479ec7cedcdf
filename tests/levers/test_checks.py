"""A declaration that can never work is refused when the catalogue is loaded, in a sentence that says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import service.levers as catalogue
from service.levers import CIRCUMSTANCES, LEVERS, discover
from service.levers.base import Choice, Effect, Exclusion, Lever, Memory, Stage, Together
from service.levers.checks import mistakes

OFF, ON = Choice("off", "as it is"), Choice("on", "otherwise", function="on")
NEW = Lever("new", "A new one.", (OFF, ON), "off", "https://example.org", stage="model")
MISSPELT: dict[str, Any] = {"stage": "modle"}  # which mypy would say, too


def told(lever: Lever) -> list[str]:
    """The mistakes of the catalogue with one more lever."""
    return mistakes({**LEVERS, lever.name: lever}, CIRCUMSTANCES)


def excluding(**when: tuple[str, ...]) -> Lever:
    return replace(NEW, exclusions=(Exclusion(when, "they clash", "https://example.org"),))


def test_the_catalogue_has_no_mistake_nor_has_a_plain_lever() -> None:
    assert told(NEW) == []
    assert told(excluding(new=("on",), labels=("classes",), optimizer=("sgd",))) == []


@pytest.mark.parametrize("stage", ["optimizer", "batching", "quantised", "loading", "evaluation"])
def test_a_stage_that_has_one_lever_is_closed_to_others(stage: Stage) -> None:
    """The recipe has one function for it: of a second lever nothing would be called."""
    choices = tuple(replace(one, function="on") for one in NEW.choices)
    (sentence,) = told(replace(NEW, stage=stage, choices=choices))
    assert sentence.startswith(f"the lever new has the stage {stage}, at which only")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"memory": Memory(state=4.0)}, "new=on says state of memory, which is read of the lever optimizer only"),
        ({"memory": Memory(weight=1.0)}, "new=on says weight of memory, which is read of the lever quantization only"),
        ({"memory": Memory(activations=0.0)}, "new=on has the memory factor activations=0; it is a factor"),
        ({"memory": Memory(half=50.0)}, "new=on has the memory factor half=50; it is a factor"),
        ({"effect": Effect(0.0)}, "new=on has the effect factor=0; it is a factor"),
        ({"effect": Effect(host=95.0)}, "new=on has the effect host=95; it is a factor"),
        ({"effect": Effect(spread=0.0)}, "new=on has an effect whose spread is not above 0"),
        ({"summary": " "}, "new=on has no summary"),
    ],
)
def test_what_a_choice_says_is_read_and_possible(changes: dict[str, Any], sentence: str) -> None:
    (found,) = told(replace(NEW, choices=(OFF, replace(ON, **changes))))
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    ("lever", "sentence"),
    [
        (replace(NEW, **MISSPELT), "the lever new has the stage modle; there are: data"),
        (replace(NEW, stage="data"), "new=on has a function, which nobody calls at the stage data"),
        (replace(NEW, methods=("Lora",)), "the lever new is for methods that there are not: Lora; there are: lora"),
        (replace(NEW, tasks=("causal_lm",)), "the lever new is for tasks that there are not: causal_lm; there are: "),
        (replace(NEW, simulated=("of",)), "the lever new names choices that it does not have: of"),
        (replace(NEW, families=(("on", "off"), ("on",))), "the lever new has a choice in two families"),
        (replace(NEW, choices=(OFF, OFF)), "the lever new needs choices, each with a name of its own"),
        (replace(NEW, choices=(replace(OFF, effect=Effect(0.9)), ON)), "new=off is the baseline, and expected effects"),
        (replace(NEW, together=(Together({"new": ("on",)}, 0.9, ""),)), "the lever new has a rule on new, which has"),
        (replace(NEW, together=(Together({"new": ("on",), "task": ("x",)}, 0.9, ""),)), "the lever new has a rule on"),
        (excluding(new=("on",), optimiser=("sgd",)), "the lever new has a rule on new, optimiser, which names optimis"),
        (excluding(new=("on",), optimizer=("SGD",)), "the lever new has a rule on new, optimizer, which names values"),
        (excluding(new=("on",), clipping=("yes",)), "the lever new has a rule on new, clipping, which names values t"),
        (excluding(new=("on",), task=("lm",)), "the lever new has a rule on new, task, which names values that task"),
        (excluding(new=("on", "off"), clipping=("on",)), "the lever new excludes all of its own choices"),
        (excluding(new=("off",), cache=("kept",)), "the lever new excludes the baseline of new, cache"),
        (excluding(optimizer=("sgd",), cache=("kept",)), "the lever new has a rule on optimizer, cache, which has to"),
    ],
)
def test_what_a_lever_names_exists(lever: Lever, sentence: str) -> None:
    (found,) = told(lever)
    assert found.startswith(sentence)


def test_a_mistake_is_told_where_the_catalogue_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.levers.cache.LEVER", replace(LEVERS["cache"], methods=("Lora",)))
    with pytest.raises(ValueError, match="the lever cache is for methods that there are not: Lora"):
        discover()
    assert catalogue.LEVERS is LEVERS

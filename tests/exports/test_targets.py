"""Each trainer's words: every choice of the catalogue has one, and every key is one that the trainer knows."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from transformers import BitsAndBytesConfig

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.recommendation import Contribution, Recommendation
from service.contract.states import Origin
from service.errors import NotYet
from service.exports import EXPORTS, axolotl
from service.exports.hugging_face import INDUCTOR
from service.exports.trainer import job_arguments
from service.exports.words import NOBODY, cannot, nearest, says, sentences
from service.levers import LEVERS
from service.levers.base import Choice, Lever
from service.recommend import recommend
from service.tasks import TASKS
from tests.conftest import ROOT
from tests.factory import DATASET, configuration, measured, record

TARGETS = {name: export.target for name, export in EXPORTS.items() if export.target is not None}
EVERY = [(lever.name, choice) for lever in LEVERS.values() for choice in lever.names]
METHODS = ("lora", "qlora", "full")
CIRCUMSTANCES = ("method", "dropout", "remote_code", "weights", "columns")  # beside levers, of which a word depends
GPU = {"device": "cuda", "capability": (9, 0)}
Facts = Callable[..., HardwareFacts]


@lru_cache
def wheels(trainer: str) -> dict[str, dict[str, Any]]:
    """Package -> what is kept of its wheel for a trainer."""
    text = (ROOT / "tests" / "exports" / "fields" / f"{trainer}.json").read_text("utf-8")
    return {one["package"]: one for one in json.loads(text)}


def known(trainer: str, *classes: str) -> set[str]:
    """The names that these classes, or all, have in the trainer's wheels; enumerations are no names of keys."""
    found = {name: fields for one in wheels(trainer).values() for name, fields in one["names"].items()}
    kept = classes or [name for name in found if name not in ("OptimizerNames", "AttentionFunction")]
    return {field for name in kept for field in found[name]}


# Export -> (trainer whose wheels are kept, the keys that it knows).
PLUGINS = {axolotl.LIGER: "LigerArgs", axolotl.CUT: "CutCrossEntropyArgs"}
CONFIGURATION = (
    *("AxolotlInputConfig", "ModelInputConfig", "ModelOutputConfig", "LoraConfig"),
    *("HyperparametersConfig", "RemappedParameters"),
)
KEYS: dict[str, tuple[str, set[str]]] = {
    "trainer": ("transformers", known("transformers", "TrainingArguments")),
    "trl": ("trl", known("trl", "SFTConfig", "_BaseConfig") | known("transformers", "TrainingArguments")),
    "trl.yaml": ("trl", known("trl") - {"path", "name"} | known("transformers", "TrainingArguments")),
    "axolotl": ("axolotl", known("axolotl", *CONFIGURATION)),
    "llamafactory": ("llamafactory", known("llamafactory") - known("llamafactory", "DatasetAttr") | {"packing"}),
    "ms-swift": ("ms-swift", known("ms-swift")),
    "accelerate": ("accelerate", set()),  # by its own parser: test_accelerate.py
    "unsloth": ("unsloth", set()),  # by sections: test_the_script_for_unsloth_calls_what_there_is
}


def made(facts: Facts, method: str = "lora", weights: str | None = None, **levers: str) -> Recommendation:
    """A recommendation of these levers, over weights of that dtype."""
    spec = JobSpec.model_validate(
        {
            "model": {"source": "org/model", "revision": "main"},
            "dataset": {"source": "data/rows.jsonl", "max_length": 512},
            "method": method,
            "training": {"effective_batch_size": 32},
        }
    )
    chosen = configuration(method, 32, 8, **levers)
    trials = (
        record(measured(configuration(method, 32, 8), 20.0), Origin.baseline),
        record(measured(chosen, 10.0, weights_dtype=weights), number=2),
    )
    found = recommend("job1", spec, facts(), trials, {})
    assert found is not None
    return found


def reading(found: Recommendation, columns: tuple[str, ...]) -> Recommendation:
    """The recommendation for data of other columns."""
    return found.model_copy(update={"dataset": DATASET.model_copy(update={"columns": {one: one for one in columns}})})


def without_a_word(lever: Lever) -> list[tuple[str, str]]:
    """(export, choice) for every choice of a lever that an export has no word for."""
    return [
        (name, choice)
        for name, target in TARGETS.items()
        for choice in lever.names
        if target.word(lever.name, choice) is NOBODY
    ]


@pytest.mark.parametrize("name", LEVERS)
def test_every_choice_has_a_word_for_every_exporter(name: str) -> None:
    assert without_a_word(LEVERS[name]) == []


def test_a_lever_that_is_added_has_words_as_far_as_its_own_file_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that holds the code has it all; elsewhere a choice is lost, and says what to do for Trainer."""
    choices = (Choice("off", "as is"), Choice("on", "so", not_expressible="call it"), Choice("more", "otherwise"))
    monkeypatch.setitem(LEVERS, "new", Lever("new", "A new one.", choices, "off", "https://example.org"))
    scripts = [name for name, target in TARGETS.items() if target.rest is not None]
    assert {"trainer", "trl"} <= set(scripts)
    assert without_a_word(LEVERS["new"]) == [(name, "more") for name in TARGETS if name not in scripts]
    word = TARGETS["trl.yaml"].word("new", "on")
    assert word.verdict == "cannot" and word.note.endswith("for transformers' Trainer: call it")
    assert TARGETS["trl.yaml"].word("new", "off").verdict == "says"


def test_a_target_of_few_words_loses_the_baselines_that_set_something(facts: Facts) -> None:
    """A trainer has an optimizer and a precision of its own: what is not said of them is lost as a baseline, too."""
    silent = replace(TARGETS["trl.yaml"], words={})
    found = made(facts, precision="fp32")
    assert {"precision", "optimizer", "attention", "batching"} <= {one.lever for one in silent.losses(found)}
    assert {word.verdict for word in (silent.word("kernels", "off"), silent.word("checkpointing", "off"))} == {"says"}


def test_exports_that_hold_the_code_have_a_new_task(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "new", replace(TASKS["causal-lm"], name="new"))
    found = made(facts)
    found = found.model_copy(update={"spec": found.spec | {"task": "new"}})
    having = {name for name, target in TARGETS.items() if target.refuses(found) is None}
    assert having == {"trainer", "accelerate"}


@pytest.mark.parametrize("export", TARGETS)
def test_words_are_about_choices_that_exist_and_say_why(export: str) -> None:
    target = TARGETS[export]
    assert {(lever, choice) for lever, words in target.words.items() for choice in words} <= set(EVERY)
    for words in target.words.values():
        for word in (one for spoken in words.values() for one in spoken.every()):
            assert word.verdict == "says" or word.note, "what is not said has a reason"
            assert not word.note.endswith(".")
            assert all(lever in LEVERS or lever in CIRCUMSTANCES for lever in word.when)
            for lever, choices in word.when.items():
                assert lever not in LEVERS or set(choices) <= set(LEVERS[lever].names)


@pytest.mark.parametrize("export", TARGETS)
def test_what_a_word_switches_is_written_where_it_is_off_too(export: str) -> None:
    """Unset keys are not neutral, so that each word with keys has one among those that are always written."""
    target = TARGETS[export]
    for lever, words in target.words.items():
        for choice, spoken in words.items():
            for word in spoken.every():
                assert not word.keys or set(word.keys) & set(target.neutral), (lever, choice)


@pytest.mark.parametrize("export", TARGETS)
def test_inductor_is_kept_from_wrong_gradients(export: str) -> None:
    """Wherever a trainer compiles by inductor: pytorch issue 193061."""
    for choice, spoken in TARGETS[export].words.get("compile", {}).items():
        for word in spoken.every():
            if word.keys.get("torch_compile") and word.keys.get("torch_compile_backend") != "cudagraphs":
                assert dict(word.environment) == INDUCTOR, choice


@pytest.mark.parametrize("export", TARGETS)
def test_the_pins_are_those_of_the_wheel(export: str) -> None:
    target = TARGETS[export]
    trainer, _ = KEYS[export]
    wheel = wheels(trainer)[target.package]
    assert wheel["version"] == target.version and len(wheel["sha256"]) == 64
    required = {one.name: one.specifier for one in map(Requirement, wheel["requires"])}
    for pin in map(Requirement, target.pins):
        assert set(pin.specifier) <= set(required[pin.name]), f"{pin} is not what the wheel requires"


def job_settings(export: str, recommendation: Recommendation) -> dict[str, Any]:
    """The keys of an exported file: those of the YAML, or those of the script's dictionary of arguments."""
    if export == "trainer":  # the script itself takes long to print
        return job_arguments(recommendation)
    if export == "trl":
        return {}
    found: dict[str, Any] = yaml.safe_load(EXPORTS[export].write(recommendation))
    return found


def points(method: str) -> list[dict[str, str]]:
    """Choices one by one, wherever the lever has an effect."""
    return [{lever: choice} for lever, choice in EVERY if LEVERS[lever].applies(method, "causal-lm")]


@pytest.mark.parametrize("export", [name for name, (_, keys) in KEYS.items() if keys])
@pytest.mark.parametrize("method", METHODS)
def test_every_key_is_one_that_the_trainer_knows(export: str, method: str, facts: Facts) -> None:
    trainer, keys = KEYS[export]
    usual = made(facts, method)
    written = job_settings(export, usual)
    assert set(written) - _of_plugins(export, written) <= keys
    for point in points(method):
        levers = usual.configuration.levers | point
        chosen = usual.model_copy(update={"configuration": usual.configuration.model_copy(update={"levers": levers})})
        written = TARGETS[export].keys(chosen)
        assert set(written) - _of_plugins(export, written) <= keys, point
        for where, allowed in _values(export, trainer).items():
            assert written.get(where) is None or written[where] in allowed, point


def test_every_target_is_held_to_something() -> None:
    assert set(KEYS) == set(TARGETS)


def _of_plugins(export: str, written: dict[str, Any]) -> set[str]:
    """The keys that the plugins named in a file of Axolotl's add."""
    if export != "axolotl":
        return set()
    return {key for plugin in written.get("plugins", []) for key in known("axolotl", PLUGINS[plugin])}


def _values(export: str, trainer: str) -> dict[str, set[str]]:
    """Key -> the values that it may have, where a trainer takes any text and fails late."""
    found = wheels(trainer)
    optimizers = set((found.get("transformers") or wheels("transformers")["transformers"])["names"]["OptimizerNames"])
    if export == "axolotl":
        own = found["axolotl"]["names"]
        return {
            # It knows the names of these two, and says "Unhandled optimizer" when it comes to make one.
            "optimizer": optimizers | set(own["CustomSupportedOptimizers"]) - {"ao_adamw_8bit", "ao_adamw_4bit"},
            "attn_implementation": set(own["CANONICAL_ATTN_IMPLS"]),
        }
    kernels = (
        {"flash_attn": set(found["llamafactory"]["names"]["AttentionFunction"])} if export == "llamafactory" else {}
    )
    return {"optim": optimizers, **kernels}


@pytest.mark.parametrize("columns", [("prompt", "completion"), ("messages",), ("text",)])
def test_axolotls_datasets_and_options_have_fields_that_it_knows(columns: tuple[str, ...], facts: Facts) -> None:
    written = yaml.safe_load(EXPORTS["axolotl"].write(reading(made(facts, checkpointing="selective"), columns)))
    (dataset,) = written["datasets"]
    assert set(dataset) <= known("axolotl", "SFTDataset")
    assert not isinstance(dataset["type"], dict) or set(dataset["type"]) <= known("axolotl", "UserDefinedPrompterType")
    assert set(written["selective_checkpointing"]) <= known("axolotl", "SelectiveCheckpointingConfig")
    scaled = yaml.safe_load(EXPORTS["axolotl"].write(made(facts, "full", float8="rowwise")))
    assert set(scaled["fp8_config"]) <= known("axolotl", "FP8Config")


@pytest.mark.parametrize("columns", [("prompt", "completion"), ("messages",), ("text",)])
def test_the_other_trainers_know_the_data_too(columns: tuple[str, ...], facts: Facts) -> None:
    found = reading(made(facts), columns)
    text = EXPORTS["llamafactory"].write(found)
    told = text[text.index("# Put this into dataset_info.json") :].partition("\n#\n")[2]
    (entry,) = json.loads("".join(line.removeprefix("#") for line in told.splitlines())).values()
    assert {*entry.get("columns", {}), *entry.get("tags", {})} <= known("llamafactory", "DatasetAttr")
    mixture = yaml.safe_load(EXPORTS["trl.yaml"].write(found))
    assert set(mixture["datasets"][0]) <= known("trl", "DatasetConfig")
    assert yaml.safe_load(EXPORTS["ms-swift"].write(found))["dataset"] == ["data/rows.jsonl"]
    compile(EXPORTS["unsloth"].write(found), "unsloth_train.py", "exec")


def test_what_the_job_says_of_its_data_is_written_or_told_to_be_lost(facts: Facts) -> None:
    found = made(facts)
    where = {"source": "org/chats", "revision": "abc123", "splits": {"train": "train_sft"}}
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    form = found.dataset.form.model_copy(update={"chat_template": template}) if found.dataset else None
    data = DATASET.model_copy(update={"columns": {"messages": "messages"}, "form": form, "is_local": False})
    found = found.model_copy(update={"dataset": data, "spec": found.spec | {"dataset": found.spec["dataset"] | where}})
    told = ("the split 'train_sft'", "not of abc123", "dataset.chat_template")
    written = ("train_sft", "abc123", template)
    for export in ("axolotl", "trl.yaml", "llamafactory", "ms-swift", "unsloth"):
        text = EXPORTS[export].write(found)
        above, told_of = (text if export == "unsloth" else _of_yaml(text)), " ".join(text.replace("#", " ").split())
        for lost, value in zip(told, written, strict=True):
            assert (lost in told_of) is not (value in above), (export, value)


def _of_yaml(text: str) -> str:
    """What a file says to the trainer: its keys, and for LLaMA-Factory the entry of dataset_info.json."""
    entry = text[text.find("# Put this into dataset_info.json") :] if "# Put this into" in text else ""
    return str(yaml.safe_load(text)) + entry


def test_trl_adds_no_loss_that_balances_routers(facts: Facts) -> None:
    """Unset, it takes the coefficient of the model's configuration; no trial had that loss."""
    assert yaml.safe_load(EXPORTS["trl.yaml"].write(made(facts)))["router_aux_loss_coef"] == 0.0
    assert TARGETS["trl"].keys(made(facts))["router_aux_loss_coef"] == 0.0


@pytest.mark.parametrize("weights", ["bfloat16", "float16", "float32"])
def test_a_quantised_model_computes_in_its_checkpoints_dtype(weights: str, facts: Facts) -> None:
    """As its trial did. Where trl.yaml said `auto`, as it does without quantisation, TRL did not start."""
    found = made(facts, "qlora", weights, precision="checkpoint")
    assert BitsAndBytesConfig(**(found.BitsAndBytesConfig or {})).bnb_4bit_compute_dtype is getattr(torch, weights)
    assert yaml.safe_load(EXPORTS["trl.yaml"].write(found))["dtype"] == weights
    whole = made(facts, "full", weights, precision="checkpoint")
    assert yaml.safe_load(EXPORTS["trl.yaml"].write(whole))["dtype"] == "auto"


def constants(text: str) -> dict[str, Any]:
    """The values that a script for Unsloth gives its constants, made without the rest of it."""
    found: dict[str, Any] = {"torch": torch}
    nodes: list[ast.stmt] = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    exec(compile(ast.Module(nodes, []), "unsloth_train.py", "exec"), found)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_the_script_for_unsloth_calls_what_there_is(method: str, facts: Facts) -> None:
    text = EXPORTS["unsloth"].write(made(facts, method, checkpointing="offloaded"))
    values = constants(text)
    assert set(values["LOAD"]) <= known("unsloth", "FastLanguageModel.from_pretrained")
    adapted = known("unsloth", "FastLlamaModel.get_peft_model") | {"use_dora"}  # which it takes among its **kwargs
    assert set(values["ADAPT"]) <= adapted
    assert set(values["TRAIN"]) <= known("unsloth", "SFTConfig", "_BaseConfig", "TrainingArguments")
    assert values["LOAD"]["load_in_4bit"] is (method == "qlora") and values["LOAD"]["full_finetuning"] is (
        method == "full"
    )
    sections = {
        "load": known("unsloth", "FastLanguageModel.from_pretrained"),
        "adapt": adapted,
        "train": known("unsloth", "SFTConfig", "_BaseConfig", "TrainingArguments"),
    }
    for key in {key for words in TARGETS["unsloth"].words.values() for one in words.values() for key in one.keys}:
        section, _, name = key.partition(".")
        assert name in sections[section], key


@pytest.mark.parametrize("export", TARGETS)
def test_the_head_says_versions_and_what_is_lost(export: str, facts: Facts) -> None:
    found = made(facts, "lora", batching="token-budget", projections="fused", precision="bf16-mixed")
    factors = {"batching": 1.4, "projections": 1.25, "precision": 1.1}
    ablation = tuple(_brings(lever, factor) for lever, factor in factors.items())
    found = found.model_copy(update={"contributions": ablation})
    target = TARGETS[export]
    text = EXPORTS[export].write(found)
    flat = " ".join(text.replace("\n# ", "\n").split())
    assert f"Written for {target.package} {target.version}, which pins" in flat and "torch 2.13.0" in flat
    losses = target.losses(found)
    assert "batching" in {one.lever for one in losses}
    for sentence in sentences(losses):
        assert f"- {sentence}." in flat
    assert "1.40 times as long" in flat
    lost = [one.lever for one in losses if one.word.verdict == "cannot"]
    assert target.slower(found) == pytest.approx(math.prod(factors.get(lever, 1.0) for lever in lost))


@pytest.mark.parametrize("export", TARGETS)
def test_the_command_keeps_to_the_one_gpu_that_was_measured(export: str, facts: Facts) -> None:
    """With all that it sees a trainer would multiply the effective batch."""
    on_cpu, on_gpu = (made(partial(facts, **device)) for device in ({}, GPU))
    above = EXPORTS[export].write(on_gpu).splitlines()[:4]
    (started,) = (line for line in above if line.endswith(TARGETS[export].run))
    assert "CUDA_VISIBLE_DEVICES=0 " in started
    assert "CUDA_VISIBLE_DEVICES=" not in EXPORTS[export].write(on_cpu)


def _brings(lever: str, factor: float) -> Contribution:
    return Contribution(lever=lever, baseline="a", choice="b", factor=factor, low=1.0, high=2.0, reason="")


def test_a_word_depends_on_what_else_was_chosen() -> None:
    word = says(a=1).only({"attention": ("flex",)}, nearest("another").only({"method": ("full",)}, cannot("none")))
    assert [word.at({"attention": "flex"}).verdict, word.at({"method": "full"}).verdict, word.at({}).verdict] == [
        "says",
        "nearest",
        "cannot",
    ]
    assert len(list(word.every())) == 3


def test_another_trainers_task_is_refused_in_a_sentence(facts: Facts) -> None:
    found = made(facts)
    found = found.model_copy(update={"spec": found.spec | {"task": "sequence-classification"}})
    for name, target in TARGETS.items():
        if target.tasks is not None and "sequence-classification" not in target.tasks:
            with pytest.raises(NotYet, match="sequence-classification"):
                EXPORTS[name].write(found)

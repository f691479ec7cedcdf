"""train.py reads data of every form as its trial did, and its text holds only what the job's own data ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from service.contract.hardware import HardwareFacts
from service.exports import EXPORTS
from service.recommend import recommend
from tests.child import tiny
from tests.exports.test_train_py import script
from tests.factory import configuration, measured, record
from training.source import ROWS_AT_ONCE
from worker.child import data
from worker.child.build import recipe_of

TALK = [{"from": "human", "value": "name"}, {"from": "gpt", "value": "path"}]
ASKED = [{"role": "user", "content": "name"}, {"role": "assistant", "content": "path"}]
COUNTED = [{"prompt": "count", "completion": at if at % 3 else ""} for at in range(24)]
CLASSIFY = {"task": "sequence-classification"}
# The kind of model, the data's file and text, what the job says of them.
TEXT = [{"type": "text", "text": "pa"}, {"type": "text", "text": "th"}]
PARTS = [
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "value", "weight": 0},
    {"role": "user", "content": "name"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look"}}]},
    {"role": "tool", "content": TEXT},
    {"role": "assistant", "content": TEXT},
]
FORMS: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    "sharegpt": (
        "llama",
        "a.jsonl",
        (json.dumps({"conversations": TALK}) + "\n") * 24,
        {"chat_template": "chatml"},
        {},
    ),
    "conversations in parts, with weights and calls": (
        "llama",
        "a.jsonl",
        (json.dumps({"messages": PARTS}) + "\n") * 24,
        {"chat_template": "chatml", "max_length": 128},
        {},
    ),
    "alpaca": (
        "llama",
        "a.jsonl",
        '{"instruction": "name", "input": "path", "output": "self"}\n{"instruction": "a", "output": "b"}\n' * 12,
        {},
        {},
    ),
    "tools": (
        "llama",
        "a.jsonl",
        f"{json.dumps({'messages': ASKED, 'tools': [{'name': 'weather'}]})}\n{json.dumps({'messages': ASKED})}\n" * 12,
        {"chat_template": "{{ tools and tools[0].name }}{% for m in messages %}{{ m.content }}{% endfor %}"},
        {},
    ),
    "names": ("bert", "a.csv", "\ufefftext;label\n" + "return, self;pos\nvalue;neg\n" * 12, {}, CLASSIFY),
    "array": ("llama", "a.json", json.dumps(COUNTED), {}, {}),
}


CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/a-*}, {split: test, path: main/b.jsonl}]
- config_name: other
  data_files: other.jsonl
---"""


@pytest.mark.parametrize("form", FORMS)
def test_it_reads_what_the_trial_read(form: str, tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    kind, name, text, dataset, changes = FORMS[form]
    (tmp_path / name).write_text(text, encoding="utf-8")
    reads_the_same(kind, tmp_path / name, tmp_path, dataset, changes, facts)


def test_it_reads_the_configuration_that_the_trial_read(tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    folder = tmp_path / "data"
    for name, word in (("main/a-0", "return"), ("main/a-1", "path"), ("main/b", "self"), ("other", "value")):
        tiny.write(folder / f"{name}.jsonl", [{"text": word}] * 9)
    (folder / "README.md").write_text(CARD)
    dataset = {"config": "main", "splits": {"validation": "test"}}
    assert len(reads_the_same("llama", folder, tmp_path, dataset, {}, facts).train) == 18


@pytest.mark.parametrize("rows", [ROWS_AT_ONCE + 5, 1])
def test_it_reads_parts_of_which_no_row_validates(
    rows: int, tmp_path: Path, facts: Callable[..., HardwareFacts]
) -> None:
    """Rows are read in parts; the last one here has none that validates, and a tokenizer refuses an empty list."""
    source = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(rows))
    assert len(reads_the_same("llama", source, tmp_path, {}, {}, facts).train) >= min(rows, 950)


@pytest.mark.parametrize("task", ["causal-lm", "sequence-classification"])
def test_it_reads_parts_of_which_all_rows_train(task: str, tmp_path: Path, facts: Callable[..., HardwareFacts]) -> None:
    """As where files are named after the splits."""
    classes = task == "sequence-classification"
    for name, count in (("train", ROWS_AT_ONCE + 5), ("validation", 9)):
        rows = [{"text": f"path {at}", "label": at % 2} if classes else {"text": f"path {at}"} for at in range(count)]
        tiny.write(tmp_path / "rows" / f"{name}.jsonl", rows)
    dataset = {"splits": {"validation": "validation"}}
    kind = "bert" if classes else "llama"
    assert len(reads_the_same(kind, tmp_path / "rows", tmp_path, dataset, {"task": task}, facts).train) > ROWS_AT_ONCE


def reads_the_same(
    kind: str,
    source: Path,
    tmp_path: Path,
    dataset: dict[str, Any],
    changes: dict[str, Any],
    facts: Callable[..., HardwareFacts],
) -> data.Data:
    """The samples that a trial reads, which are train.py's."""
    folder = tiny.save(kind, tmp_path / "model")
    made = configuration(method="full", effective=8, precision="fp32")
    dataset = {"source": str(source), "max_length": 64} | dataset
    spec = tiny.job(folder, source, dataset=dataset, method="full", **changes)
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"weights": "random"})})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = data.load(spec, recipe_of(spec, made), tokenizer, tiny.workplace(tmp_path))
    found = recommend("j", spec, facts(), (record(measured(made, dataset=ours.facts)),), {})
    assert found is not None
    module = script(EXPORTS["train.py"].write(found), tmp_path)
    seen: list[Any] = []

    def looked(_model: Any, samples: Any, *_: Any) -> int:
        seen.extend(samples)
        return 0

    module.train = looked  # type: ignore[attr-defined]
    module.main(["--device", "cpu", "--output", str(tmp_path / "out")])
    assert seen == list(ours.train)
    if spec.dataset.chat_template:
        saved = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert saved.chat_template == ours.facts.form.chat_template
    if ours.facts.form.classes:
        assert AutoConfig.from_pretrained(tmp_path / "out").label2id == ours.facts.form.classes
    return ours

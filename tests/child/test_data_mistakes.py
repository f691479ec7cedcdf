"""Mistakes in a user's data that are easily met: each is one sentence, never a crash of the trial."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.child import tiny
from tests.conftest import ROOT
from tests.factory import configuration
from training.errors import TrainingError
from worker.child import data, rows
from worker.child.build import recipe_of

TALK = [{"role": "user", "content": "name a word"}, {"role": "assistant", "content": "path"}]


def load(source: Path, tokenizer: Any, task: str = "causal-lm", **changes: Any) -> data.Data:
    """The data of a source, as a trial loads it."""
    training = changes.pop("training", {})
    spec = tiny.job(source, source, task=task, dataset={"source": str(source), "max_length": 64} | changes)
    spec = spec.model_copy(update={"training": spec.training.model_copy(update=training)})
    return data.load(spec, recipe_of(spec, configuration()), tokenizer, tiny.workplace(source.parent))


def read_splits(given: dict[str, Any], source: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training and validation rows of a causal language model's job."""
    spec = tiny.job(source, source, dataset=given | {"source": str(source)})
    return rows.read_rows(spec, recipe_of(spec, configuration()), source)[:2]


def refused(call: Any, *arguments: Any, **named: Any) -> str:
    """The one sentence of a TrainingError."""
    with pytest.raises(TrainingError) as caught:
        call(*arguments, **named)
    sentence = str(caught.value)
    assert sentence and "\n" not in sentence and len(sentence) < 400
    return sentence


def test_quotes_line_breaks_and_large_fields_of_csv_survive(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text,label\n"one, ""two""\nthree",1\n' + "é" * 300_000 + ",0\n", encoding="utf-8")
    train, held_out = read_splits({}, path)
    found = {(row["text"], row["label"]) for row in [*held_out, *train]}
    assert found == {('one, "two"\nthree', "1"), ("é" * 300_000, "0")}


def test_text_of_another_encoding_is_named(tmp_path: Path) -> None:
    for ending in (".jsonl", ".csv"):
        path = tmp_path / f"latin{ending}"
        path.write_bytes('{"text": "café"}\n'.encode("latin-1"))
        assert path.name in refused(read_splits, {}, path)


def test_half_of_a_surrogate_pair_is_named_with_its_row(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "a", "completion": "b"})
    path.write_text("\n".join([good] * 4 + [good.replace('"b"', '"\\ud800"')]))
    assert "the column 'completion' of training row 5 has half of" in refused(load, path, tokenizer)


def test_a_csv_row_with_more_fields_than_columns_does_not_break_the_message(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("source,goal\na,b,c\n")
    assert "source, goal" in refused(load, path, tokenizer)


def test_a_split_is_not_found_inside_other_words(tmp_path: Path) -> None:
    table = tiny.pairs(20)
    tiny.write(tmp_path / "train.jsonl", table)
    tiny.write(tmp_path / "constraints.jsonl", [{"something": "else"}])
    tiny.write(tmp_path / "validation.jsonl", tiny.pairs(3))
    train, _ = read_splits({"splits": {"validation": "validation"}}, tmp_path)
    assert train == table


def test_validation_files_are_never_trained_on(tmp_path: Path) -> None:
    """No file is called train, so all are: all but those that are held out by name."""
    table, held_out = tiny.pairs(20), tiny.pairs(3, seed=1)
    tiny.write(tmp_path / "rows.jsonl", table)
    tiny.write(tmp_path / "validation.jsonl", held_out)
    assert read_splits({"splits": {"validation": "validation"}}, tmp_path) == (table, held_out)


@pytest.mark.parametrize("wrong", [0.0, [], {}, {"a": 1}])
def test_text_that_is_no_text_is_named_also_when_it_is_empty(tmp_path: Path, tokenizer: Any, wrong: object) -> None:
    path = tiny.write(tmp_path / "rows.jsonl", [*tiny.pairs(20), {"prompt": "ask", "completion": wrong}])
    assert type(wrong).__name__ in refused(load, path, tokenizer)


def test_an_empty_field_does_not_hide_a_wrong_one(tmp_path: Path, tokenizer: Any) -> None:
    table = [*tiny.pairs(20), {"prompt": "ask", "completion": None}]
    path = tiny.write(tmp_path / "rows.jsonl", table)
    found = load(path, tokenizer).facts
    assert found.rows + found.validation_rows == 20 and "an empty completion" in found.notes[0], "null is empty text"
    tiny.write(path, [*table, {"prompt": "ask", "completion": 5.5}])
    assert "float" in refused(load, path, tokenizer)


@pytest.mark.parametrize("text", [None, 5.5, []])
def test_a_classifiers_text_must_be_text(tmp_path: Path, tokenizer: Any, text: object) -> None:
    path = tiny.write(tmp_path / "rows.jsonl", [*tiny.classes(6), {"text": text, "label": 1}])
    assert "text" in refused(load, path, tokenizer, task="sequence-classification")


@pytest.mark.parametrize("label", ["", "1.5", math.nan, math.inf])
def test_labels_must_be_numbers_from_zero(tmp_path: Path, tokenizer: Any, label: object) -> None:
    path = tiny.write(tmp_path / "rows.jsonl", [*tiny.classes(6), {"text": "odd one", "label": label}])
    assert repr(label) in refused(load, path, tokenizer, task="sequence-classification")


def test_labels_of_csv_may_be_written_with_a_point(tmp_path: Path, tokenizer: Any) -> None:
    """As pandas writes whole numbers of a column in which one is missing."""
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}.0\n" for row in tiny.classes(20)))
    found = load(path, tokenizer, task="sequence-classification")
    assert {labels[0] for _, labels in found.train} == {0, 1, 2}
    assert found.facts.form.classes == {"0.0": 0, "1.0": 1, "2.0": 2}


def test_rows_of_one_label_are_no_data_to_learn_from(tmp_path: Path, tokenizer: Any) -> None:
    path = tiny.write(tmp_path / "rows.jsonl", [{"text": "return", "label": "a"}] * 8)
    sentence = refused(load, path, tokenizer, task="sequence-classification")
    assert "all rows have the label 'a', so there is nothing to tell apart" in sentence


def test_labels_of_csv_are_numbers_too(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in tiny.classes(20)))
    assert {labels[0] for _, labels in load(path, tokenizer, task="sequence-classification").train} == {0, 1, 2}


def test_messages_learn_what_the_assistant_says(tmp_path: Path, tokenizer: Any) -> None:
    talk = [*TALK, {"role": "user", "content": "for name"}, {"role": "assistant", "content": "return value"}]
    path = tiny.write(tmp_path / "rows.jsonl", [{"messages": talk}] * 4)
    ids, labels = load(path, tokenizer).train[0]
    assert tokenizer.decode([label for label in labels if label != -100]) == "path</s>return value</s>"
    assert [one for one, label in zip(ids, labels, strict=True) if label not in (-100, one)] == []


def test_a_template_that_writes_earlier_turns_otherwise_learns_the_last_only(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortened = "{% if loop.last %}{{ m.content }}{{ eos_token }}{% else %}...{% endif %}"
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% else %}"
        + shortened
        + "{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    talk = [*TALK, {"role": "user", "content": "for name"}, {"role": "assistant", "content": "return value"}]
    path = tiny.write(tmp_path / "rows.jsonl", [{"messages": talk}] * 4)
    _, labels = load(path, tokenizer).train[0]
    assert tokenizer.decode([label for label in labels if label != -100]) == "return value</s>"


@pytest.mark.parametrize("row", [{"prompt": "return", "completion": "self value"}, {"messages": None}])
def test_all_of_a_sample_may_be_learnt(tmp_path: Path, tokenizer: Any, row: dict[str, Any]) -> None:
    row = {"messages": TALK} if "messages" in row else row
    path = tiny.write(tmp_path / "rows.jsonl", [row] * 4)
    ids, labels = load(path, tokenizer, training={"loss_on": "all"}).train[0]
    assert list(labels) == [-100, *ids[1:]]


def test_without_a_begin_token_the_first_token_of_a_text_is_still_no_target(tmp_path: Path) -> None:
    """In a packed row it would be predicted from the sample before it."""
    from transformers import AutoTokenizer

    path = tiny.write(tmp_path / "rows.jsonl", [{"text": "return self value"}] * 4)
    plain = AutoTokenizer.from_pretrained(ROOT / "examples" / "llama-13m")
    plain.bos_token = None
    ids, labels = load(path, plain).train[0]
    assert list(labels) == [-100, *ids[1:]] and len(ids) > 2


def test_messages_without_a_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = tiny.write(tmp_path / "rows.jsonl", [{"messages": TALK}] * 4)
    plain = AutoTokenizer.from_pretrained(ROOT / "examples" / "llama-13m")
    assert "chat template" in refused(load, path, plain)


@pytest.mark.parametrize(
    "wrong", ["hello", ["hello"], None, 5, [{"role": "robot", "content": "x"}]], ids=lambda one: json.dumps(one)[:12]
)
def test_messages_that_are_no_messages_are_the_users_problem(tmp_path: Path, tokenizer: Any, wrong: object) -> None:
    path = tiny.write(tmp_path / "rows.jsonl", [*[{"messages": TALK}] * 4, {"messages": wrong}])
    assert str(wrong)[:20] in refused(load, path, tokenizer), "the sentence shows what it met"

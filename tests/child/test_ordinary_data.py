"""Data as ordinary users have them: read as they are meant, with a note of what was assumed, or refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.rows import read
from tests.child import tiny
from tests.child.test_data_mistakes import TALK, load, read_splits, refused
from tests.child.test_rows_and_data import load as load_with_cache
from tests.conftest import ROOT
from tests.factory import configuration
from training.model import model_config
from worker.child.build import recipe_of
from worker.child.data import Data

CLASSIFY = "sequence-classification"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SHAREGPT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "name a word"},
    {"from": "gpt", "value": "path"},
]


def notes(found: Data) -> str:
    """All that the answer will say about the data."""
    return " ".join(found.facts.notes)


def file(folder: Path, name: str, text: str) -> Path:
    """A file of that text."""
    path = folder / name
    path.write_bytes(text.encode())
    return path


def every(path: Path) -> list[dict[str, Any]]:
    """All rows of a file that is too small for any to be held out."""
    return read_splits({}, path)[0]


# Conversations


def test_conversations_of_sharegpt_are_read_as_messages(tmp_path: Path, tokenizer: Any) -> None:
    same = [{"role": "system", "content": "be brief"}, *TALK]
    ours = load(tiny.write(tmp_path / "a.jsonl", [{"messages": same}] * 20), tokenizer)
    theirs = load(tiny.write(tmp_path / "b.jsonl", [{"conversations": SHAREGPT}] * 20), tokenizer)
    assert list(theirs.train) == list(ours.train) and not ours.facts.notes
    assert theirs.facts.form.sharegpt and "ShareGPT" in notes(theirs)


def test_an_answer_is_learnt_from_its_beginning_though_it_was_prompted_to_think(tmp_path: Path, tokenizer: Any) -> None:
    """DeepSeek's templates end their prompt with <think>, which they do not write before an answer."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}{% else %}[assistant]{{ m.content }}</s>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    )
    talk = [
        {"role": "user", "content": "name a word"},
        {"role": "assistant", "content": "return"},
        {"role": "user", "content": "and another"},
        {"role": "assistant", "content": "the list of keys"},
    ]
    found = load(tiny.write(tmp_path / "a.jsonl", [{"messages": talk}] * 4), tokenizer, chat_template=template)
    _, labels = found.train[0]
    assert tokenizer.decode([one for one in labels if one != -100]) == "return</s>the list of keys</s>"


@pytest.mark.parametrize("odd", [[{"from": "bing", "value": "x"}], [{"from": "gpt", "value": None}], TALK, "hello"])
def test_a_turn_of_sharegpt_that_cannot_be_read_is_shown(tmp_path: Path, tokenizer: Any, odd: Any) -> None:
    path = tiny.write(tmp_path / "rows.jsonl", [*[{"conversations": SHAREGPT}] * 4, {"conversations": odd}])
    sentence = refused(load, path, tokenizer)
    assert "conversations" in sentence and "human, user, gpt, assistant" in sentence


def test_an_assistant_that_says_nothing_teaches_nothing(tmp_path: Path, tokenizer: Any) -> None:
    """Not even to end at once; what it says in other turns is learnt."""
    silent = [TALK[0], {"role": "assistant", "content": ""}]
    found = load(
        tiny.write(tmp_path / "rows.jsonl", [{"messages": silent + TALK}] * 4 + [{"messages": silent}]), tokenizer
    )
    assert found.facts.rows == 4 and "1 of 5 training rows" in notes(found)
    assert tokenizer.decode([label for label in found.train[0][1] if label != -100]) == "path</s>"
    for none in (silent, []):
        path = tiny.write(tmp_path / "rows.jsonl", [{"messages": none}] * 4)
        assert "no training row has anything to learn" in refused(load, path, tokenizer)


def plain() -> Any:
    """The example's tokenizer, which has no chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "examples" / "llama-13m")


def test_without_a_chat_template_the_sentence_says_whose_and_what_to_do(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "rows.jsonl", [{"messages": TALK}] * 4)
    sentence = refused(load, path, plain())
    assert str(path) in sentence and "dataset.chat_template" in sentence, "the job's model is called as its data here"


def test_a_job_brings_its_chat_template(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "rows.jsonl", [{"messages": TALK}] * 4)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    as_text, as_file = (load(path, plain(), chat_template=one) for one in (TEMPLATE, str(tmp_path / "mine.jinja")))
    assert list(as_text.train) == list(as_file.train) and as_text.facts.form.chat_template == TEMPLATE
    assert plain().decode(as_file.train[0][0]) == "[user]name a word</s>[assistant]path</s>"
    known = load(path, plain(), chat_template="chatml")
    assert "<|im_start|>assistant\npath<|im_end|>" in plain().decode(known.train[0][0])


def test_a_chat_template_that_is_not_there_or_fails(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "data" / "rows.jsonl", [{"messages": TALK}] * 4)
    (tmp_path / "elsewhere.jinja").write_text(TEMPLATE)
    missing = refused(load, path, plain(), chat_template="none.jinja")
    assert "dataset.chat_template" in missing and "none.jinja" in missing
    assert "outside the allowed folders" in refused(load, path, plain(), chat_template="../elsewhere.jinja")
    assert "template" in refused(load, path, plain(), chat_template="{% for m in messages %}")


def test_a_chat_template_that_the_data_have_no_use_for_is_said(tmp_path: Path) -> None:
    found = load(tiny.write(tmp_path / "rows.jsonl", tiny.pairs(20)), plain(), chat_template="chatml")
    assert found.facts.form.chat_template is None and "dataset.chat_template" in notes(found)


# Labels


def classes(folder: Path, *labels: Any) -> Path:
    """Rows with these labels, each ten times."""
    return tiny.write(folder / "rows.jsonl", [{"text": "return value", "label": one} for one in labels * 10])


@pytest.mark.parametrize(
    ("labels", "numbered"),
    [
        (["pos", "neg"], {"neg": 0, "pos": 1}),
        ([7, 0, 2], {"0": 0, "2": 1, "7": 2}),
        (["7", "10", "0"], {"0": 0, "7": 1, "10": 2}),
        ([1, 10**12], {"1": 0, str(10**12): 1}),
    ],
)
def test_labels_are_numbered_in_sorted_order(
    tmp_path: Path, tokenizer: Any, labels: list[Any], numbered: dict[str, int]
) -> None:
    found = load(classes(tmp_path, *labels), tokenizer, CLASSIFY)
    assert found.facts.form.classes == numbered
    assert {one for _, (one,) in found.train} == set(range(len(labels)))
    assert all(f"{name!r} is {number}" in notes(found) for name, number in numbered.items())


def test_labels_that_are_class_numbers_stay(tmp_path: Path, tokenizer: Any) -> None:
    found = load(classes(tmp_path, 1, 0, "2"), tokenizer, CLASSIFY)
    assert not found.facts.form.classes and not found.facts.notes
    assert {one for _, (one,) in found.train} == {0, 1, 2}


@pytest.mark.parametrize("odd", ["maybe", "", " ", None, -1, "-1", "0.5", ["pos"]])
def test_labels_that_are_neither_names_nor_numbers_are_refused(tmp_path: Path, tokenizer: Any, odd: Any) -> None:
    usual = ("pos", "neg") if odd != "maybe" else (0, 1)
    sentence = refused(load, classes(tmp_path, *usual, odd), tokenizer, CLASSIFY)
    assert repr(odd) in sentence and "label" in sentence


def test_the_model_knows_what_its_classes_are_called(tmp_path: Path, tokenizer: Any, bert: Path) -> None:
    path = classes(tmp_path, "pos", "neg")
    found = load(path, tokenizer, CLASSIFY)
    spec = tiny.job(bert, path, task=CLASSIFY)
    config = model_config(bert, tokenizer, [found.train], recipe_of(spec, configuration(), found.facts))
    assert config.id2label == {0: "neg", 1: "pos"} and config.label2id == {"neg": 0, "pos": 1}
    assert config.num_labels == 2


# Files


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", '{"text": "a"}\n{"text": "é"}\n'),
        ("rows.json", '\n[{"text": "a"},\n {"text": "é"}]'),
        ("rows.csv", "text\na\né\n"),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, name: str, text: str, mark: str) -> None:
    assert every(file(tmp_path, name, mark + text)) == [{"text": "a"}, {"text": "é"}]


def test_a_json_array_is_noted_and_its_mistakes_are_told(tmp_path: Path, tokenizer: Any) -> None:
    path = file(tmp_path, "rows.json", json.dumps(tiny.pairs(20), indent=1))
    assert load(path, tokenizer).facts.form.json_arrays
    assert "line 3" in refused(every, file(tmp_path, "rows.json", '[\n{"text": "a"},\n{"text": b}]'))
    assert "row 2" in refused(every, file(tmp_path, "rows.json", '[{"text": "a"}, "b"]'))
    assert "one array" in refused(every, file(tmp_path, "rows.json", '{\n"text": "a"\n}'))


def test_a_folder_may_hold_both_kinds_of_json(tmp_path: Path) -> None:
    file(tmp_path, "train-1.json", '[{"text": "a"}]')
    file(tmp_path, "train-2.json", '{"text": "b"}\n{"text": "c"}\n')
    file(tmp_path, "about.json", '{\n"rows": 3\n}')
    assert every(tmp_path) == [{"text": "a"}, {"text": "b"}, {"text": "c"}]


@pytest.mark.parametrize(("mark", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_csv_may_be_separated_otherwise(tmp_path: Path, tokenizer: Any, mark: str, name: str) -> None:
    text = f'text{mark}label\n"a{mark} b, c"{mark}0\nd, e{mark}1\n' + f"f{mark}1\n" * 20
    found = load(file(tmp_path, "rows.csv", text), tokenizer, CLASSIFY)
    assert found.facts.columns == {"text": "text", "label": "label"} and name in notes(found)
    assert every(tmp_path / "rows.csv")[0] == {"text": f"a{mark} b, c", "label": "0"}
    file(tmp_path, "other.csv", "text,label\na,0\n")
    assert "other.csv" in refused(every, tmp_path)


def test_a_separator_within_quotes_separates_nothing(tmp_path: Path) -> None:
    text = '"prompt; with; notes",completion\na,b\n'
    assert list(read(file(tmp_path, "rows.csv", text))) == [{"prompt; with; notes": "a", "completion": "b"}]


def test_fields_that_the_header_has_no_column_for_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    text = "prompt,completion\n" + "return,self\n" * 20 + "name,a comma, unquoted\n" * 3 + "value,path,,\n"
    assert "3 csv rows have more fields than the header" in notes(load(file(tmp_path, "rows.csv", text), tokenizer))
    text = text.replace("name,a comma, unquoted\n", "", 2)
    assert "1 csv row has more fields than the header" in notes(load(file(tmp_path, "rows.csv", text), tokenizer))


def test_an_effective_batch_beyond_the_data_is_told(tmp_path: Path, tokenizer: Any) -> None:
    for count, words in ((1, "there is 1 training sample,"), (2, "there are 2 training samples,")):
        path = tiny.write(tmp_path / "rows.jsonl", tiny.pairs(count))
        assert words in notes(load(path, tokenizer, training={"effective_batch_size": 32}))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    assert "'text' twice" in refused(every, file(tmp_path, "rows.csv", "text,label,text\na,0,b\n"))
    assert len(every(file(tmp_path, "rows.csv", "text,,\na,,\nb,,\n"))) == 2, "columns without a name are of no use"


@pytest.mark.parametrize(
    "broken",
    ['"never closed,1\n' + "plain,0\n" * 50, '"never closed,1\nplain,0\n"quoted, as is",1\n' + "plain,0\n" * 50],
)
def test_a_quote_that_is_not_closed_is_refused_with_its_line(tmp_path: Path, broken: str) -> None:
    sentence = refused(every, file(tmp_path, "rows.csv", 'text,label\n"two\nlines",0\n' + broken))
    assert "rows.csv, line 4" in sentence and "quote" in sentence


def test_whole_numbers_in_a_text_column_are_read_as_text(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "count", "completion": at} for at in range(20)]
    numbers = load(tiny.write(tmp_path / "a.jsonl", rows), tokenizer)
    texts = load(
        tiny.write(tmp_path / "b.jsonl", [row | {"completion": str(row["completion"])} for row in rows]), tokenizer
    )
    assert list(numbers.train) == list(texts.train) and numbers.facts.form.numbers_as_text and not texts.facts.notes
    assert "'completion'" in notes(numbers) and "20 of 20 rows" in notes(numbers)


# Rows without anything to learn


def test_rows_that_are_left_out_are_counted_with_the_reason(tmp_path: Path, tokenizer: Any) -> None:
    rows = (
        [{"prompt": "return " * 80, "completion": "x"}] * 50 + tiny.pairs(40) + [{"prompt": "a", "completion": ""}] * 10
    )
    found = load(tiny.write(tmp_path / "rows.jsonl", rows), tokenizer)
    assert found.facts.rows + found.facts.validation_rows == 40
    text = notes(found)
    assert "of 95 training rows" in text and "of 5 validation rows" in text
    assert "max_length (64 tokens)" in text and "nothing to learn" in text


def test_a_job_with_nothing_left_to_learn_fails(tmp_path: Path, tokenizer: Any) -> None:
    empty = tiny.write(
        tmp_path / "rows.jsonl", [{"prompt": "a", "completion": ""}, {"prompt": "b", "completion": None}] * 9
    )
    assert "no training row has anything to learn" in refused(load, empty, tokenizer)
    assert load(empty, tokenizer, training={"loss_on": "all"}).facts.rows == 18, "the prompts are learnt"
    texts = tiny.write(tmp_path / "rows.jsonl", [{"text": ""}] * 9)
    assert "no training row has anything to learn" in refused(load, texts, tokenizer)


def test_a_validation_row_that_is_trained_on_as_well_is_said(tmp_path: Path, tokenizer: Any) -> None:
    held = [{"prompt": "a", "completion": "", "part": "held"}]
    rows = [row | {"part": "learn"} for row in tiny.pairs(20)] + held
    splits = {"column": "part", "train": "learn", "validation": "held"}
    found = load(tiny.write(tmp_path / "rows.jsonl", rows), tokenizer, splits=splits)
    assert "no validation row" in notes(found).lower() and found.facts.validation_rows == 1


def test_what_was_assumed_survives_the_cache(tmp_path: Path, tokenizer: Any) -> None:
    path = classes(tmp_path, "pos", "neg")
    first, again = (load_with_cache(path, tmp_path / "cache", CLASSIFY).facts for _ in range(2))
    assert first == again and first.notes

"""Data that is not as it should be: refused with a sentence where it can be seen, never an error of the service."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service import validate
from service.contract.paths import Roots

Make = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
LABELLED = "sequence-classification"


@pytest.fixture
def refused(api: TestClient, job: Make, root: Path) -> Callable[..., str | None]:
    """Submits a job on a file of that content; what it is refused with, or None."""

    def go(name: str, content: str, **changes: Any) -> str | None:
        (root / name).write_text(content)
        more = {field: changes.pop(field) for field in ("splits", "chat_template") if field in changes}
        answer = api.post("/v1/jobs", json=job(dataset={"source": name, **more}, **changes))
        assert answer.status_code in (202, 422), answer.text
        return str(answer.json()["detail"]) if answer.status_code == 422 else None

    return go


Refused = Callable[..., str | None]


@pytest.mark.parametrize("kind", ["pipe", "loop"])
@pytest.mark.parametrize("field", ["dataset", "model"])
def test_what_is_neither_a_file_nor_a_folder(api: TestClient, job: Make, root: Path, kind: str, field: str) -> None:
    name = f"{kind}.jsonl"
    os.mkfifo(root / name) if kind == "pipe" else os.symlink(root / name, root / name)
    answer = api.post("/v1/jobs", json=job(**{field: {"source": f"./{name}"}}))
    assert answer.status_code == 422 and answer.json()["errors"][0]["pointer"] == f"/{field}/source"


def test_a_csv_row_with_more_fields_than_the_header(refused: Refused) -> None:
    assert refused("a.csv", "prompt,completion\na,b,c,d\n") is None
    assert "there are" in str(refused("b.csv", "prompt,completion\na,b,c\n", splits={"column": "s"}))


def test_a_csv_field_as_long_as_the_worker_reads(refused: Refused) -> None:
    assert refused("a.csv", f"prompt,completion\na,{'b' * 200_000}\n") is None


@pytest.mark.parametrize(
    ("label", "words"),
    [("Infinity", "holds inf"), ("NaN", "holds nan"), ("1.5", "holds 1.5"), ("null", "holds None"), ("-1", "holds -1")],
)
def test_a_label_that_is_no_class(refused: Refused, label: str, words: str) -> None:
    assert words in str(refused("a.jsonl", f'{{"text": "a", "label": {label}}}\n', task=LABELLED))


@pytest.mark.parametrize("name", ["label", "labels", "target"])
def test_labels_are_looked_at_under_every_usual_name(refused: Refused, name: str) -> None:
    rows = [{"text": "a", name: 1}, {"text": "b", name: "positive"}]
    assert "holds 'positive'" in str(refused("a.jsonl", "\n".join(map(json.dumps, rows)), task=LABELLED))


def test_a_later_row_without_the_label(refused: Refused) -> None:
    content = '{"text": "a", "label": 1}\n{"text": "b"}\n'
    assert "lacks the column 'label': {'text': 'b'}" in str(refused("a.jsonl", content, task=LABELLED))


def test_labels_of_rows_that_are_not_read(refused: Refused) -> None:
    content = '{"text": "a", "label": 1, "s": "train"}\n{"text": "b", "label": -1, "s": "test"}\n'
    assert refused("a.jsonl", content, task=LABELLED, splits={"column": "s"}) is None


def test_no_column_that_the_task_can_read(refused: Refused) -> None:
    content = '{"foo": "a", "bar": 1}\n'
    told = str(refused("a.jsonl", content))
    assert "needs prompt and completion, messages, or text; the data has: foo, bar; say which is which, as in" in told
    assert 'as in dataset.columns: {prompt: "foo", completion: "bar"}' in told
    assert "needs text and label" in str(refused("a.jsonl", content, task=LABELLED))
    assert refused("b.jsonl", '{"instruction": "a", "output": "b"}\n') is None


@pytest.mark.parametrize(
    ("name", "content", "changes"),
    [
        ("a.jsonl", '\ufeff{"prompt": "a", "completion": "b"}\n', {}),
        ("a.json", '\ufeff[{"prompt": "a", "completion": 7}]', {}),
        ("a.csv", "\ufeffprompt;completion\na, b;c\n", {}),
        ("a.jsonl", '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}', {}),
        ("a.csv", "text,label\na,neg\nb,pos\n", {"task": LABELLED}),
        ("a.csv", "text,label\na,7\nb,0\n", {"task": LABELLED}),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', {"chat_template": "chatml"}),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', {"chat_template": "{{ messages }}"}),
    ],
)
def test_ordinary_data(refused: Refused, name: str, content: str, changes: dict[str, Any]) -> None:
    assert refused(name, content, **changes) is None


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "prompt,completion,prompt\na,b,c\n", "names 'prompt' twice"),
        ("a.csv", 'prompt,completion\na,b\n"a,b\n' + "a,b\n" * 50, "line 3: a quoted field begins"),
        ("a.json", '{\n"prompt": "a"}', "one JSON object a line, or one array of them"),
        ("a.jsonl", '{"prompt": "a", "completion": ["b"]}', "holds ['b'] (list), which is not text"),
        ("a.jsonl", '{"conversations": [{"from": "robot", "value": "a"}]}', "must be one of human, user"),
    ],
)
def test_data_that_nobody_can_read_as_it_is_meant(refused: Refused, name: str, content: str, words: str) -> None:
    assert words in str(refused(name, content))


ROW = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", json.dumps(ROW | {"more": "x" * 3000})),
        ("a.json", json.dumps(ROW | {"more": "x" * 3000})),
        ("a.json", json.dumps([ROW | {"more": "x" * 3000}])),
        ("a.csv", ",".join(f"column {at}" for at in range(500)) + "\n"),
        ("a.csv", 'prompt,completion\na,"' + "b\n" * 1000),
    ],
)
def test_no_more_than_the_beginning_is_read(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    """A row that is longer is left to the worker: whoever may ask for a check could have the service hold anything."""
    assert len(content) > 1000
    monkeypatch.setattr(validate, "MOST_READ", 1000)
    assert refused(name, content) is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "array.json", "a.csv"])
def test_what_the_beginning_says_is_told(refused: Refused, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(validate, "MOST_READ", 1000)
    rows = [{"prompt": "a", "other": "b"}] * 200
    lines = "prompt,other\n" + "a,b\n" * 500 if name == "a.csv" else "\n".join(map(json.dumps, rows))
    assert "dataset.columns" in str(refused(name, json.dumps(rows) if name == "array.json" else lines))


def test_a_header_of_many_columns_is_answered_at_once_and_in_short(refused: Refused) -> None:
    header = ",".join(f"column {at}" for at in range(20_000))
    sentence = str(refused("a.csv", f"{header}\n{header}\n"))
    assert "column 19 and 19980 more" in sentence and len(sentence) < 1000


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("llama", "must be a template's text, a path that ends in .jinja, or chatml, not 'llama'"),
        ("none.jinja", "none.jinja does not exist"),
        ("../outside.jinja", "outside the allowed folders"),
    ],
)
def test_a_chat_template_that_is_none(refused: Refused, root: Path, template: str, words: str) -> None:
    (root.parent / "outside.jinja").write_text("{{ messages }}")
    content = '{"messages": [{"role": "user", "content": "a"}]}'
    sentence = str(refused("a.jsonl", content, chat_template=template))
    assert "dataset.chat_template" in sentence and words in sentence


@pytest.mark.parametrize("content", ["[" * 5000, '{"a": ' + "9" * 5000 + "}"])
def test_json_that_cannot_be_held(refused: Refused, content: str) -> None:
    assert "line 1" in str(refused("a.jsonl", content))


@pytest.mark.parametrize("source", ["x" * 300, "./" + "x" * 300, "~nouser/x.jsonl", "a/" * 2000])
@pytest.mark.parametrize("part", ["model", "dataset"])
def test_sources_that_no_system_takes(api: TestClient, job: Make, part: str, source: str) -> None:
    answer = api.post("/v1/jobs", json=job(**{part: {"source": source}}))
    assert answer.status_code == 422 and f"{part}.source" in answer.json()["detail"], answer.text


def test_what_may_not_be_read(api: TestClient, job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_self: Roots, _source: str, path: Path) -> bool:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Roots, "holds", closed)  # the tests may run as root, whom nothing stops
    answer = api.post("/v1/jobs", json=job())
    assert answer.status_code == 422 and "data.jsonl cannot be read (Permission denied)" in answer.json()["detail"]


def test_half_a_character_in_a_column_s_name(refused: Refused) -> None:
    assert "there are: prompt\\ud83d" in str(refused("a.jsonl", '{"prompt\\ud83d": "a"}\n', splits={"column": "s"}))

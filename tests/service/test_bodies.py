"""Bodies as they come: JSON is read as JSON, YAML without its traps; a bad one is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

Make = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def name_of(api: TestClient, content: str | bytes) -> str:
    answer = api.post("/v1/jobs", content=content)
    assert answer.status_code == 202, answer.text
    return str(api.get(f"/v1/jobs/{answer.json()['id']}").json()["name"])


def test_escaped_emoji_in_json(api: TestClient, job: Make) -> None:
    assert name_of(api, json.dumps(job(name="fast \U0001f680"))) == "fast \U0001f680"


def test_json_with_tabs_and_with_a_byte_order_mark(api: TestClient, job: Make) -> None:
    assert name_of(api, json.dumps(job(), indent="\t")) == "test"
    assert name_of(api, b"\xef\xbb\xbf" + json.dumps(job()).encode()) == "test"


def test_a_date_is_text(api: TestClient, job: Make) -> None:
    body = json.dumps(job())[1:-1].replace('"name": "test"', "name: 2026-02-31")
    assert name_of(api, "{" + body + "}") == "2026-02-31"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("baseline: &x {a: *x}", "aliases (*name) are not read"),
        ("a: &a [x]\nb: [*a, *a]", "line 2, column 5: aliases"),
        ("[" * 3000, "nested too deeply"),
        ("{a: " * 3000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ("name: !!binary aGVsbG8=", "tags (!name) are not read"),
        ("a: !!python/object:os.system {}", "tags (!name) are not read"),
        ('{"name": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("model: [", "line 1"),
        ("just text", "must be a mapping"),
        (b"\xff\xfe\x00", "neither JSON nor YAML"),
    ],
)
def test_one_sentence(api: TestClient, body: str | bytes, words: str) -> None:
    answer = api.post("/v1/jobs", content=body)
    assert answer.status_code == 400 and answer.json()["code"] == "malformed-body", answer.text
    assert words in answer.json()["detail"] and "\n" not in answer.json()["detail"]

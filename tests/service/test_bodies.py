"""Bodies as they come: JSON is read as JSON, YAML without its traps; a bad one is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

Make = Callable[..., dict[str, Any]]
YAML = {"Content-Type": "application/yaml"}
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def name_of(api: TestClient, content: str | bytes) -> str:
    answer = api.post("/v1/jobs", content=content, headers=YAML)
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
        ("baseline: &x {a: *x}", "is YAML with aliases (*name) at line 1, column 18, which are not read."),
        ("a: &a [x]\nb: [*a, *a]", "aliases (*name) at line 2, column 5, which are not read."),
        ("[" * 3000, "nested too deeply"),
        ("{a: " * 3000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ("name: !!binary aGVsbG8=", "is YAML with tags (!name) at line 1, column"),
        ("a: !!python/object:os.system {}", "is YAML with tags (!name) at line 1, column"),
        ('{"name": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("model: [", "line 1"),
        ("name: a\nname: b", "'name' is there twice"),
        ('{"name": "a", "name": "b"}', "'name' is there twice"),
        ('{"search": {"minutes": NaN}}', "NaN is no number of JSON"),
        ("{[a]: 1}", "a key must be text"),
        ("a: [" + "1," * 240_000 + "1]", "more than 2,000 values"),
        ("".join(f"k{number}: 1\n" for number in range(40_000)), "more than 2,000 values"),
        ("{" + ",".join(f'"k{number}": 1' for number in range(70_000)) + "}", "more than 2,000 values"),
        ("a: " + "x" * 700_000, "as YAML it is too large: 512 KiB are read"),
        ("just text", "must be a mapping"),
        (b"\xff\xfe\x00", "neither JSON nor YAML"),
    ],
)
def test_one_sentence(api: TestClient, body: str | bytes, words: str) -> None:
    answer = api.post("/v1/jobs", content=body, headers=YAML)
    assert answer.status_code == 400 and answer.json()["code"] == "malformed-body", answer.text
    assert words in answer.json()["detail"] and "\n" not in answer.json()["detail"]


def test_twenty_mistakes_are_told_and_the_others_counted(api: TestClient, job: Make) -> None:
    answer = api.post("/v1/jobs", json=job(**{f"k{number}": 1 for number in range(500)}))
    assert answer.status_code == 422 and len(answer.json()["errors"]) == 20
    assert answer.json()["detail"].endswith("There are 480 more mistakes.") and len(answer.content) < 8000
    answer = api.post("/v1/jobs", json=job(**{f"k{number}": 1 for number in range(21)}))
    assert answer.json()["detail"].endswith("There is 1 more mistake.")


@pytest.mark.parametrize("body", ["{", '{"memory_gib": NaN}', "[1]"])
def test_a_body_of_an_estimate_that_cannot_be_read(api: TestClient, body: str) -> None:
    answer = api.post("/v1/estimates", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["code"] == "malformed-body"


@pytest.mark.parametrize("memory", ["1e999", "-1", "true", '"much"', "1e300"])
def test_the_memory_of_an_estimate_is_a_finite_number(api: TestClient, job: Make, memory: str) -> None:
    body = f'{{"spec": {json.dumps(job())}, "memory_gib": {memory}}}'
    answer = api.post("/v1/estimates", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422 and answer.json()["code"] == "invalid-job"
    assert [mistake["pointer"] for mistake in answer.json()["errors"]] == ["/memory_gib"]

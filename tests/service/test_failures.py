"""What goes wrong inside is answered as a problem too, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, text

from service import jobs
from service.settings import Settings
from tests.service.conftest import here

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def lenient(settings: Settings) -> Any:
    """An API whose failures are answered, not raised into the test."""
    with here(settings, raises=False) as client:
        yield client


def test_a_mistake_of_ours(lenient: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "page", lambda *_: 1 / 0)
    answer = lenient.get("/v1/jobs")
    assert answer.status_code == 500 and answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "internal" and "zero" not in answer.text


def test_a_schema_that_is_gone(lenient: TestClient, engine: Engine, job: Make) -> None:
    with engine.begin() as connection:
        for table in ("job_labels", "events", "tasks", "submissions", "jobs", "workers"):
            connection.execute(text(f"DROP TABLE {table}"))
    for answer in (lenient.get("/v1/jobs"), lenient.post("/v1/jobs", json=job()), lenient.get("/readyz")):
        assert answer.status_code == 503 and answer.json()["code"] == "unavailable", answer.text
        assert "`dynotune serve` brings them up to date" in answer.json()["detail"]


def test_a_nul_in_path_and_query(lenient: TestClient) -> None:
    for path in ("/v1/jobs/a%00b", "/v1/jobs?label=a%00=b", "/v1/trials/%00"):
        answer = lenient.get(path)
        assert answer.status_code in (200, 404, 422), answer.text
        assert answer.status_code == 200 or answer.json()["code"] in ("not-found", "bad-query")


def test_as_much_as_the_contract_allows(lenient: TestClient, job: Make) -> None:
    wide = "\U0001f680" * 200
    body = job(name=wide, labels={wide: wide}, hardware={"name": "\u0130" * 100, "memory_gib": 1_000_000})
    body["training"] |= {"seed": 2**32 - 1, "epochs": 1_000_000}
    answer = lenient.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    assert lenient.get(f"/v1/jobs/{answer.json()['id']}").status_code == 200

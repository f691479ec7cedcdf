"""Every hostile request gets the answer that the table says: short, a sentence, and never a failure of the service."""

from __future__ import annotations

from pathlib import Path

from fastapi.testclient import TestClient

from service.settings import Settings
from tests.service.conftest import here
from tests.service.hostile import BODIES, REQUESTS

LONGEST_ANSWER = 2000  # bytes: an answer echoes little of what was sent


def said(api: TestClient, request: str, headers: dict[str, str], body: str | bytes | None) -> tuple[int, str]:
    """(status, code) of the answer, or what is wrong with it."""
    method, _, path = request.partition(" ")
    answer = api.request(method, path, headers=headers, content=body)
    if len(answer.content) > LONGEST_ANSWER:
        return answer.status_code, f"{len(answer.content)} bytes"
    if answer.headers.get("content-type") != "application/problem+json":
        return answer.status_code, answer.text
    problem = answer.json()
    if "Traceback" in problem["detail"] or "\n" in problem["detail"] or "\x1b" in problem["detail"]:
        return answer.status_code, problem["detail"]
    return answer.status_code, problem["code"]


def test_every_hostile_request_is_refused_as_it_says(settings: Settings, tmp_path: Path) -> None:
    table = [(name, "POST /v1/jobs", {"content-type": kind}, body, wanted) for name, kind, body, wanted in BODIES]
    assert len(table) + len(REQUESTS) >= 120
    with here(settings, raises=False) as api:
        wrong = [
            (name, request, found, wanted)
            for name, request, headers, body, wanted in (*table, *REQUESTS)
            if (found := said(api, request, headers, body)) != wanted
        ]
        assert wrong == []
        assert api.get("/v1/jobs").json()["items"] == [], "nothing was queued"
        assert api.get("/healthz").status_code == 200

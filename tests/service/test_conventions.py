"""Conventions of the API: filters, versions and tags, waiting, streams, checks, headers, metrics, and its document."""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.client import Client
from service.contract.hardware import HardwareFacts
from service.queue import Queue
from tests.conftest import ROOT
from tests.service.test_api import run_trial, submit

Make = Callable[..., dict[str, Any]]
Facts = Callable[..., HardwareFacts]


def test_lists_are_filtered_by_name_and_time(api: TestClient, job: Make) -> None:
    first, second = submit(api, job(name="Alpha 100%")), submit(api, job(name="beta"))
    times = {one["id"]: one["created_at"] for one in api.get("/v1/jobs").json()["items"]}

    def found(**query: Any) -> set[str]:
        return {one["id"] for one in api.get("/v1/jobs", params=query).json()["items"]}

    assert found(name="alpha") == {first} and found(name="100%") == {first} and found(name="%") == {first}
    assert found(name="a") == {first, second} and found(name="_") == set()
    assert found(created_after=times[first]) == {second} and found(created_before=times[second]) == {first}
    assert api.get("/v1/jobs", params={"created_after": "nan"}).status_code == 422
    refused = api.get("/v1/jobs", params={"created_before": "2026-11-28"})
    assert refused.status_code == 422 and "seconds since 1970" in refused.json()["detail"]


def test_a_tag_changes_with_the_job_only(api: TestClient, queue: Queue, job: Make) -> None:
    path = f"/v1/jobs/{submit(api, job())}"
    first = api.get(path)
    tag = first.headers["etag"]
    assert tag.startswith('W/"') and first.headers["cache-control"] == "no-cache"
    same = api.get(path, headers={"If-None-Match": f'"other", {tag}'})
    assert same.status_code == 304 and same.content == b"" and same.headers["etag"] == tag
    api.post(f"{path}/cancel")
    changed = api.get(path, headers={"If-None-Match": tag})
    assert changed.status_code == 200 and changed.json()["version"] > first.json()["version"]


def test_waiting_for_news(api: TestClient, queue: Queue, facts: Facts, job: Make) -> None:
    """An answer comes with the next event, which another process may have written."""
    path = f"/v1/jobs/{submit(api, job())}"
    version = api.get(path).json()["version"]
    assert api.get(path, params={"wait": 0.3, "since": version}).json()["version"] == version
    assert api.get(path, params={"wait": 50, "since": version - 1}).json()["version"] == version
    queue.register("w", 1, facts())
    threading.Timer(0.3, queue.claim, ("w", ("plan",))).start()
    news = api.get(path, params={"wait": 50, "since": version}).json()
    assert news["version"] > version and news["status"] == "running"
    assert api.get(path, params={"wait": 61, "since": 1}).status_code == 422


def test_events_as_a_stream(api: TestClient, queue: Queue, facts: Facts, job: Make) -> None:
    job_id = submit(api, job())
    queue.register("w", 1, facts())
    path = f"/v1/jobs/{job_id}/events"
    threading.Timer(0.3, lambda: (run_trial(queue, 8.0, 1), queue.stop(job_id))).start()
    kinds, ids = read_stream(api, f"{path}/stream")
    assert kinds == ["submitted", "started", "trial", "succeeded"]
    assert ids == [event["seq"] for event in api.get(path).json()["items"]]
    assert read_stream(api, f"{path}/stream", {"Last-Event-ID": str(ids[1])})[0] == ["trial", "succeeded"]
    assert read_stream(api, f"{path}/stream?after={ids[2]}")[0] == ["succeeded"]
    missing = api.get("/v1/jobs/none/events/stream")
    assert missing.status_code == 404 and missing.json()["code"] == "not-found"


def read_stream(api: TestClient, path: str, headers: dict[str, str] | None = None) -> tuple[list[str], list[int]]:
    """The kinds and ids of a stream's events, once it has ended."""
    answer = api.get(path, headers=headers or {})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data:")]
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event:")]
    ids = [int(line.removeprefix("id: ")) for line in lines if line.startswith("id:")]
    assert [(one["kind"], one["seq"]) for one in events] == list(zip(kinds, ids, strict=True))
    return kinds, ids


def test_a_job_is_looked_at_without_being_submitted(api: TestClient, queue: Queue, facts: Facts, job: Make) -> None:
    queue.register("big", 1, facts())
    queue.register("other", 2, facts(name="another CPU"))
    body = job(method=["lora", "qlora"], hardware={"name": "another"}, search={"fixed": {"precision": "fp32"}})
    found = api.post("/v1/jobs:validate", json=body).json()
    fits = {one["worker"]: one for one in found["workers"]}
    assert fits["other"]["can_serve"] and "the job wants another" in fits["big"]["why_not"]
    (space,) = found["search"]
    assert space["worker"] == "other" and space["choices"]["lora"]["precision"] == ["fp32"]
    assert space["combinations_at_most"] > 1000
    assert found["spec"]["search"]["trials"] == 30 and found["seconds_at_most"] == 3600
    assert found["seconds_of_jobs_alike"] is None
    assert api.get("/v1/jobs").json()["items"] == []
    wrong = api.post("/v1/jobs:validate", json=job(task="none"))
    assert wrong.status_code == 422 and wrong.json()["errors"][0]["pointer"] == "/task"


def test_every_answer_has_headers_that_browsers_heed_and_an_id(api: TestClient) -> None:
    for path in ("/v1/jobs", "/nowhere", "/docs", "/metrics"):
        headers = api.get(path, headers={"X-Request-ID": "mine-1"}).headers
        assert headers["x-request-id"] == "mine-1" and headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
    strange = api.get("/healthz", headers={"X-Request-ID": "a b\tc"}).headers["x-request-id"]
    assert len(strange) == 16 and api.get("/healthz").headers["x-request-id"] != strange


def test_the_description_needs_no_other_site(api: TestClient) -> None:
    for page in ("/docs", "/redoc"):
        html = api.get(page).text
        assert "cdn" not in html
        for part in html.split('src="')[1:]:
            assert api.get(part.partition('"')[0]).status_code == 200


def test_large_answers_are_compressed(api: TestClient) -> None:
    assert api.get("/v1/levers", headers={"Accept-Encoding": "gzip"}).headers["content-encoding"] == "gzip"
    assert "content-encoding" not in api.get("/healthz", headers={"Accept-Encoding": "gzip"}).headers


def test_metrics_of_the_queue(api: TestClient, queue: Queue, facts: Facts, job: Make) -> None:
    submit(api, job())
    queue.register("w", 1, facts())
    run_trial(queue, 8.0, 1)
    submit(api, job())
    said = api.get("/metrics")
    assert said.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in said.text.splitlines() if not line.startswith("#"))
    assert values['dynotune_tasks_queued{kind="plan"}'] == "2.0"
    assert values['dynotune_jobs{status="running"}'] == "1.0" and values["dynotune_workers_alive"] == "1.0"
    assert values['dynotune_outcomes{kind="trial",outcome="ok"}'] == "1.0"
    assert float(values['dynotune_oldest_task_seconds{kind="plan"}']) >= 0
    assert any(name.startswith("dynotune_http_request_seconds_count") for name in values)


def test_the_document_is_the_committed_one() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_openapi.py"))["text"]()
    assert (ROOT / "docs" / "openapi.json").read_text() == made, "run: python docs/make_openapi.py"


def test_trials_come_in_pages(
    api: TestClient, queue: Queue, facts: Facts, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(api, job())
    queue.register("w", 1, facts())
    tried: list[dict[str, str]] = [{}, {"attention": "eager"}, {"batching": "grouped"}]
    for number, levers in enumerate(tried, start=1):
        run_trial(queue, 10.0 - number, number, **levers)
    pages = [api.get(f"/v1/jobs/{job_id}/trials?limit=2&after={after}").json()["items"] for after in (0, 2, 3)]
    assert [[one["number"] for one in page] for page in pages] == [[1, 2], [3], []]
    assert [one["fastest"] for page in pages for one in page] == [False, False, True], "of all trials, not of a page"
    with Client() as client:
        client._http = api  # type: ignore[assignment]
        monkeypatch.setattr("service.client.TRIALS_A_PAGE", 2)
        assert [one.number for one in client.trials(job_id)] == [1, 2, 3]

"""What another site's page could send is refused; programs and the server's own pages are answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.api import create_app
from service.settings import Settings

Make = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
JSON = {"Content-Type": "application/json"}


FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.7"]
MALFORMED = ["0.0.0.0:8000", "", "a@localhost", "localhost:x", "[::1"]


@pytest.mark.parametrize("host", FOREIGN + MALFORMED)
@pytest.mark.parametrize("path", ["/v1/jobs", "/healthz", "/docs", "/nowhere"])
def test_a_host_that_is_another_s_is_refused(api: TestClient, host: str, path: str) -> None:
    answer = api.get(path, headers={"Host": host})
    assert answer.status_code == 421 and answer.json()["code"] == "foreign-host", answer.text
    assert "DYNOTUNE_ALLOWED_HOSTS" in answer.json()["detail"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", "a.localhost"]
)
def test_loopback_names_are_answered(api: TestClient, host: str) -> None:
    assert api.get("/v1/jobs", headers={"Host": host}).status_code == 200


def test_two_hosts_are_refused(api: TestClient) -> None:
    assert api.get("/healthz", headers=[("Host", "localhost"), ("Host", "evil.example")]).status_code == 421


@pytest.mark.parametrize(
    ("served_on", "host", "status"),
    [
        ("0.0.0.0", "192.168.1.7:8000", 200),
        ("0.0.0.0", "[fe80::1]", 200),
        ("0.0.0.0", "evil.example", 421),
        ("gpu7.example", "GPU7.example:8000", 200),
        ("127.0.0.1", "tune.example", 200),
        ("127.0.0.1", "service:8000", 200),
        ("127.0.0.1", "192.168.1.7", 421),
    ],
)
def test_the_host_served_on_and_those_allowed(settings: Settings, served_on: str, host: str, status: int) -> None:
    allowed = settings.model_copy(update={"allowed_hosts": ("tune.example", "service")})
    with TestClient(create_app(allowed, served_on), base_url="http://127.0.0.1") as client:
        assert client.get("/healthz", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"])
def test_what_a_proxy_hands_on_needs_keys(settings: Settings, name: str) -> None:
    """A proxy on the same machine names 127.0.0.1 as the host, so that all who reach it would look local."""
    for keys in (False, True):
        asking = settings.model_copy(update={"require_keys": keys})
        with TestClient(create_app(asking), base_url="http://127.0.0.1:8000") as client:
            answer = client.get("/v1/jobs", headers={name: "203.0.113.9"})
            assert client.get("/healthz", headers={name: "203.0.113.9"}).status_code == 200
        assert answer.status_code == 401
        assert ("DYNOTUNE_REQUIRE_KEYS=yes" in answer.json()["detail"]) is not keys


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"Origin": "http://127.0.0.1:8000"}, 202),
        ({"Origin": "https://127.0.0.1:8000"}, 202),  # behind a proxy that ends TLS
        ({"Origin": "http://127.0.0.1:3000"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:8000"}, 202),
        ({"Sec-Fetch-Site": "none"}, 202),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_a_change_comes_from_no_other_site(api: TestClient, job: Make, headers: dict[str, str], status: int) -> None:
    answer = api.post("/v1/jobs", content=json.dumps(job()), headers=JSON | headers)
    assert answer.status_code == status, answer.text
    assert len(api.get("/v1/jobs").json()["items"]) == (status == 202)
    if status == 403:
        assert answer.json()["code"] == "foreign-origin"
        job_id = api.post("/v1/jobs", json=job()).json()["id"]
        for ending in ("cancel", "stop"):
            assert api.post(f"/v1/jobs/{job_id}/{ending}", headers=headers).status_code == 403
        assert api.get(f"/v1/jobs/{job_id}", headers=headers).json()["status"] == "queued"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 202),
        ("application/json; charset=utf-8", 202),
        ("application/yaml", 202),
        ("text/yaml", 202),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        (None, 415),
    ],
)
def test_a_body_is_said_to_be_json_or_yaml(api: TestClient, job: Make, kind: str | None, status: int) -> None:
    answer = api.post("/v1/jobs", content=json.dumps(job()), headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == status, answer.text
    if status == 415:
        assert answer.json()["code"] == "unsupported-media-type"
        assert "must be application/json or application/yaml" in answer.json()["detail"]


def test_what_has_no_body_needs_no_type(api: TestClient, job: Make) -> None:
    job_id = api.post("/v1/jobs", json=job()).json()["id"]
    assert api.post(f"/v1/jobs/{job_id}/cancel", headers={"Content-Type": "text/plain"}).status_code == 415
    assert api.post(f"/v1/jobs/{job_id}/cancel").status_code == 202


def test_a_query_parameter_that_is_not_known_is_refused(api: TestClient, job: Make) -> None:
    for method, path, words in (
        ("POST", "/v1/jobs?dry_run=1", "'dry_run'; it takes none"),
        ("GET", "/v1/jobs?state=queued", "'state'; there are: status, label, name, created_after"),
        ("GET", "/v1/jobs?limit=1&limit=2", "limit is there 2 times"),
    ):
        answer = api.request(method, path, json=job() if method == "POST" else None)
        assert answer.status_code == 422 and answer.json()["code"] == "bad-query", answer.text
        assert words in answer.json()["detail"]
    assert api.get("/v1/jobs").json()["items"] == []


def test_head_and_what_is_allowed(api: TestClient) -> None:
    for path in ("/healthz", "/readyz", "/v1/jobs", "/openapi.json"):
        answer, whole = api.head(path), api.get(path)
        assert answer.status_code == 200 and answer.content == b""
        assert answer.headers["content-length"] == whole.headers["content-length"]
    refused = api.put("/v1/jobs")
    assert refused.status_code == 405 and refused.json()["code"] == "not-allowed"
    assert refused.headers["allow"] == "GET, HEAD, POST"
    assert api.post("/healthz").headers["allow"] == "GET, HEAD"

"""API keys: who may do what, whose jobs are seen, how many and how often; on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from service import access
from service.access import Scope
from service.cli.embedded import _must_have_a_key
from service.contract.task import TaskKind
from service.db import connect
from service.errors import BadQuery, Misconfigured, NotFound
from service.models import ApiKey
from service.remote import RemoteBroker
from service.settings import Settings
from tests.service.conftest import here

Make = Callable[..., dict[str, Any]]
ADMIN = "an-admin-key-of-the-settings"


@pytest.fixture
def locked(settings: Settings) -> Iterator[TestClient]:
    """An API that asks for keys."""
    with here(settings.model_copy(update={"require_keys": True, "admin_key": SecretStr(ADMIN)})) as client:
        yield client


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_a_key_only_the_health_is_told(locked: TestClient, job: Make) -> None:
    assert locked.get("/healthz").status_code == 200 and locked.get("/readyz").status_code == 200
    document = locked.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            address = path.format(job_id="j", trial_id="t", worker_id="w", estimate_id="e", webhook_id="h", name="json")
            answer = locked.request(method, address)
            if path in ("/healthz", "/readyz"):
                assert answer.status_code == 200 and "security" not in operation
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.json()["code"] == "unauthorized" and answer.headers["www-authenticate"] == "Bearer"
            assert {"401", "403", "429"} <= set(operation["responses"]), (method, path)
    assert locked.post("/v1/jobs", json=job()).status_code == 401


@pytest.mark.parametrize("wrong", ["dyno_00000000_" + "a" * 43, "dyno_", "x", ADMIN + "x", "dyno_\u00e9"])
def test_a_wrong_key_is_none(locked: TestClient, wrong: str) -> None:
    answer = locked.get("/v1/jobs", headers={b"Authorization": b"Bearer " + wrong.encode()})
    assert answer.status_code == 401 and "not valid" in answer.json()["detail"]


def test_what_each_scope_may_do(locked: TestClient, engine: Engine, job: Make) -> None:
    keys = {scope: bearing(access.create(engine, "ann", [scope])) for scope in Scope}
    submitted = locked.post("/v1/jobs", json=job(), headers=keys[Scope.submit])
    path = submitted.headers["location"]
    for scope, read, write, drain in (
        (Scope.read, 200, 403, 403),
        (Scope.submit, 200, 202, 403),
        (Scope.worker, 403, 403, 403),
        (Scope.admin, 200, 202, 404),
    ):
        assert locked.get(path, headers=keys[scope]).status_code == read, scope
        assert locked.post("/v1/jobs", json=job(), headers=keys[scope]).status_code == write, scope
        assert locked.post("/v1/workers/w/drain", headers=keys[scope]).status_code == drain, scope
    refused = locked.post("/v1/jobs", json=job(), headers=keys[Scope.read]).json()
    assert refused["code"] == "forbidden" and "scope submit; yours has read" in refused["detail"]


def test_an_owner_sees_its_own_jobs_only(locked: TestClient, engine: Engine, job: Make) -> None:
    ann, bob = (bearing(access.create(engine, owner, [Scope.submit])) for owner in ("ann", "bob"))
    path = locked.post("/v1/jobs", json=job(), headers=ann).headers["location"]
    assert locked.get("/v1/jobs", headers=bob).json()["items"] == []
    assert [one["owner"] for one in locked.get("/v1/jobs", headers=ann).json()["items"]] == ["ann"]
    document = locked.get("/openapi.json").json()
    of_jobs = [(one, way) for one, ways in document["paths"].items() if "{job_id}" in one for way in ways]
    assert len(of_jobs) > 10
    for one, way in of_jobs:
        address = one.format(job_id=path.rpartition("/")[2], name="json")
        answer = locked.request(way, address, headers=bob)
        assert answer.status_code == 404 and "There is no job" in answer.json()["detail"], (way, one)
    assert locked.get(path, headers=ann).json()["status"] == "queued"
    assert locked.get(path, headers=bearing(ADMIN)).json()["owner"] == "ann"


def test_a_revoked_key_is_none_from_then_on(locked: TestClient, engine: Engine) -> None:
    key = access.create(engine, "ann", [Scope.read])
    assert locked.get("/v1/jobs", headers=bearing(key)).status_code == 200
    with Session(engine) as session:
        (row,) = access.listed(session)
        assert row.used_at is not None and row.digest not in key and key.split("_", 2)[2] not in str(vars(row))
    access.revoke(engine, row.id)
    assert locked.get("/v1/jobs", headers=bearing(key)).status_code == 401
    with pytest.raises(NotFound, match="There is no key"):
        access.revoke(engine, "nothing")


def test_a_key_allows_so_many_open_jobs(locked: TestClient, engine: Engine, job: Make) -> None:
    key = bearing(access.create(engine, "ann", [Scope.submit], most_open_jobs=1))
    first = locked.post("/v1/jobs", json=job(), headers=key)
    refused = locked.post("/v1/jobs", json=job(), headers=key)
    assert refused.status_code == 429 and "allows 1" in refused.json()["detail"]
    assert int(refused.headers["retry-after"]) >= 1
    locked.post(first.headers["location"] + "/cancel", headers=key)
    assert locked.post("/v1/jobs", json=job(), headers=key).status_code == 202


def test_a_key_allows_so_many_requests_a_time(settings: Settings, engine: Engine) -> None:
    ann, bob = (bearing(access.create(engine, owner, [Scope.read])) for owner in ("ann", "bob"))
    with here(settings.model_copy(update={"rate_limit": "3/hour"})) as api:
        assert [api.get("/v1/jobs", headers=ann).status_code for _ in range(4)] == [200, 200, 200, 429]
        answer = api.get("/v1/jobs", headers=ann)
        assert answer.json()["code"] == "too-many" and 3000 < int(answer.headers["retry-after"]) <= 3600
        assert api.get("/v1/jobs", headers=bob).status_code == 200
        assert api.get("/v1/jobs").status_code == 200  # no key is asked for, so nobody is counted


def test_what_workers_ask_is_not_counted(settings: Settings, engine: Engine) -> None:
    """A few dozen idle workers of one key would use up any limit that is meant for users."""
    key = access.create(engine, "fleet", [Scope.worker])
    with here(settings.model_copy(update={"rate_limit": "2/hour"})) as api:
        workers = RemoteBroker("http://127.0.0.1:8000", key, api)  # type: ignore[arg-type]
        for _ in range(5):
            assert workers.claim("w", tuple(TaskKind)) is None


def test_no_key_no_listening_elsewhere(settings: Settings, database_url: str) -> None:
    _must_have_a_key(settings, "127.0.0.1")
    for host, changed in (("0.0.0.0", {}), ("::1", {"require_keys": True}), ("example.org", {})):
        with pytest.raises(Misconfigured, match="dynotune keys create NAME --scope admin"):
            _must_have_a_key(settings.model_copy(update=changed), host)
    engine = connect(database_url)
    access.create(engine, "ann", [Scope.submit])
    with pytest.raises(Misconfigured):
        _must_have_a_key(settings, "0.0.0.0")
    access.create(engine, "root", [Scope.admin])
    _must_have_a_key(settings, "0.0.0.0")
    engine.dispose()
    with here(settings) as open_to_loopback:
        assert open_to_loopback.get("/v1/jobs").status_code == 200


def test_an_owner_has_a_plain_name(engine: Engine) -> None:
    for owner in ("", "a b", "\x1b[2J", "a" * 101):
        with pytest.raises(BadQuery, match="An owner is"):
            access.create(engine, owner, [Scope.read])
    with Session(engine) as session:
        assert session.query(ApiKey).count() == 0


def test_the_key_of_the_settings_shares_nothing_with_an_owner(locked: TestClient, engine: Engine, job: Make) -> None:
    locked.post("/v1/jobs", json=job(), headers=bearing(ADMIN))
    (mine,) = locked.get("/v1/jobs", headers=bearing(ADMIN)).json()["items"]
    with pytest.raises(BadQuery):
        access.create(engine, mine["owner"], [Scope.submit])
    key = access.create(engine, "admin", [Scope.submit])
    assert locked.get("/v1/jobs", headers=bearing(key)).json()["items"] == []

"""What the queue stands on fails: the disk is full, the clock is set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, event, select, text
from sqlalchemy.orm import Session

from service import db
from service.contract.states import TaskState
from service.contract.task import TaskKind
from service.models import Task
from service.queue import Queue

PLAN = (TaskKind.plan,)


FULL = """
CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$
"""


def _do(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def _fill(engine: Engine) -> str:
    """Have the database find no room for a job; returns the statement that makes room again."""
    if engine.dialect.name == "postgresql":  # which says it with this code
        _do(engine, FULL, "CREATE TRIGGER full_disk BEFORE INSERT ON jobs EXECUTE FUNCTION full_disk()")
        return "DROP TRIGGER full_disk ON jobs"
    with engine.begin() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()
    _do(engine, f"PRAGMA max_page_count = {pages}")
    return "PRAGMA max_page_count = 4294967294"


def test_a_full_disk_loses_nothing(api: TestClient, job: Callable[..., dict[str, Any]]) -> None:
    """Submissions are refused with 503 and Retry-After, reads go on, and with room again everything does."""
    kept = api.post("/v1/jobs", json=job()).json()["id"]
    engine = api.app.state.context.engine  # type: ignore[attr-defined]
    room = _fill(engine)
    statuses = []
    for _ in range(200):  # a file has some room left inside
        answer = api.post("/v1/jobs", json=job(name="x" * 200))
        statuses.append(answer.status_code)
        if answer.status_code != 202:
            break
    assert statuses[-1] == 503 and "Retry-After" in answer.headers and "does not answer" in answer.json()["detail"]
    assert api.get(f"/v1/jobs/{kept}").json()["status"] == "queued"
    _do(engine, room)
    assert api.post("/v1/jobs", json=job()).status_code == 202
    assert len(api.get("/v1/jobs?limit=200").json()["items"]) == statuses.count(202) + 2


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # PostgreSQL's clock is its own
@pytest.mark.parametrize("seconds", [-86_400.0, 86_400.0])
def test_a_clock_that_is_set_strands_no_task(
    engine: Engine, spec: Callable[..., Any], facts: Callable[..., Any], seconds: float
) -> None:
    now = [1e9]
    queue = Queue(engine, clock=lambda: now[0])
    queue.submit(spec())
    queue.register("w", 1, facts())
    lost = queue.claim("w", PLAN)
    assert lost is not None
    now[0] += seconds  # and the worker is gone
    assert queue.reap() == 1, "the lease is over, whichever way the clock was set"
    with Session(engine) as session:
        assert session.scalars(select(Task.state)).one() is TaskState.queued
    now[0] -= 2 * seconds  # set again, while the task waits for its second attempt
    assert queue.claim("w", PLAN) is not None


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_transaction_whose_client_is_silent_stops_nobody(
    database_url: str, spec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends it, as after a cut network, of which the server itself would hear nothing for two hours."""
    monkeypatch.setattr(db, "IDLE_MILLISECONDS", 200)
    silent, other = db.connect(database_url), db.connect(database_url)
    with silent.connect() as connection:
        connection.execute(text("LOCK TABLE jobs"))
        assert Queue(other).submit(spec())
        connection.invalidate()
    for engine in (silent, other):
        engine.dispose()


def test_many_who_read_at_once_are_all_answered(api: TestClient, job: Callable[..., dict[str, Any]]) -> None:
    """More than there are threads and connections: those with a connection waited for a thread, and the other way."""
    kept = api.post("/v1/jobs", json=job()).json()["id"]

    async def read(path: str, count: int) -> list[int]:
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url=str(api.base_url)) as client:
            return [one.status_code for one in await asyncio.gather(*(client.get(path) for _ in range(count)))]

    for path in ("/v1/jobs", f"/v1/jobs/{kept}/events"):
        assert asyncio.run(read(path, 150)) == [200] * 150


@pytest.mark.parametrize(("query", "password"), [("", "s3cret"), ("?password=url", "url")])
def test_the_password_of_the_environment_is_taken_at_once(
    monkeypatch: pytest.MonkeyPatch, query: str, password: str
) -> None:
    """A worker takes it out of the environment, where libpq would look for it at every new connection."""
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    engine = db.connect(f"postgresql+psycopg://dynotune@nowhere/dynotune{query}")
    monkeypatch.delenv("PGPASSWORD")
    asked: list[dict[str, Any]] = []

    class Enough(Exception):
        """The arguments were seen."""

    @event.listens_for(engine, "do_connect")
    def _look(_dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]) -> None:
        asked.append(options)
        raise Enough

    with pytest.raises(Enough):
        engine.connect()
    assert asked[0]["password"] == password and asked[0]["connect_timeout"] == 10

"""The health routes, slow clients, and a database that hangs, is full or is damaged."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi.testclient import TestClient

from service.api import bodies, connections, health, internal, observing
from service.broker import connect
from service.cli.embedded import control_plane
from service.contract.hardware import HardwareFacts
from service.contract.internal import VERSION, spoken_version
from service.contract.task import TaskKind
from service.db import upgrade
from service.errors import BrokerUnavailable, Unavailable
from service.queue import Queue
from service.settings import Settings
from tests.service.conftest import here

Make = Callable[..., dict[str, Any]]
only_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def address(settings: Settings) -> Iterator[tuple[str, int]]:
    """A real server, as `serve` runs it."""
    with control_plane(settings) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def test_ready_says_how_many_workers_live(api: TestClient, queue: Queue, facts: Callable[..., HardwareFacts]) -> None:
    ready = api.get("/readyz").json()
    assert ready["status"] == "ok" and ready["workers_alive"] == 0 and "jobs wait" in ready["note"]
    queue.register("w", 1, facts())
    ready = api.get("/readyz").json()
    assert ready["workers_alive"] == 1 and ready["note"] is None


@only_sqlite
def test_a_full_disk_is_not_ready(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 20))
    answer = api.get("/readyz")
    assert answer.status_code == 503 and "is full: 1 MiB are left" in answer.json()["detail"]
    assert int(answer.headers["retry-after"]) > 0


@only_sqlite
def test_alive_while_every_thread_waits(address: tuple[str, int], job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database hangs: all of the server's threads wait for it, and /healthz answers at once all the same."""
    monkeypatch.setattr(health, "READY_SECONDS", 0.2)
    hung, waiting = threading.Event(), threading.Semaphore(0)

    def submit(*_: object) -> str:
        waiting.release()
        hung.wait(60)
        return "id"

    monkeypatch.setattr(Queue, "submit", submit)
    url = f"http://{address[0]}:{address[1]}"
    with ThreadPoolExecutor(40) as clients:
        try:
            for _ in range(40):  # as many as starlette has threads
                clients.submit(httpx.post, f"{url}/v1/jobs", json=job(), timeout=60)
            for _ in range(40):
                assert waiting.acquire(timeout=30)
            assert httpx.get(f"{url}/healthz", timeout=10).status_code == 200
            ready = httpx.get(f"{url}/readyz", timeout=10)
            assert ready.status_code == 503 and "has not answered within" in ready.json()["detail"]
        finally:
            hung.set()


@only_sqlite
def test_more_connections_than_it_has_files_for_are_hung_up_on(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 3)
    kept = [socket.create_connection(address, timeout=20) for _ in range(3)]
    try:
        for one in kept:
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with socket.create_connection(address, timeout=20) as further, contextlib.suppress(ConnectionResetError):
            assert further.recv(1) == b""
    finally:
        for one in kept:
            one.close()


@only_sqlite
def test_slow_connections_are_closed(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.3)
    silent, slow, late, idle = (socket.create_connection(address, timeout=20) for _ in range(4))
    try:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
        late.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(1 << 16).startswith(b"HTTP/1.1 200")
        idle.sendall(b"GET /hea")  # a second request on the same connection, never ended
        assert silent.recv(1) == b"" and slow.recv(1) == b""
        assert b" 408 " in late.recv(1 << 16).splitlines()[0]
        until = time.monotonic() + 20
        while idle.recv(1 << 16) and time.monotonic() < until:
            pass
        assert idle.recv(1) == b""
    finally:
        for one in (silent, slow, late, idle):
            one.close()


@only_sqlite
def test_a_damaged_file_is_said_to_be(settings: Settings, database_url: str, tmp_path: Path) -> None:
    file = Path(database_url.removeprefix("sqlite:///"))
    broker = connect(database_url)
    with here(settings, raises=False) as client:
        for extra in ("-wal", "-shm"):
            Path(f"{file}{extra}").unlink(missing_ok=True)
        file.write_bytes(b"no database" * 1000)
        for path in ("/v1/jobs", "/v1/workers", "/readyz"):
            answer = client.get(path)
            assert answer.status_code == 503 and "The database is damaged" in answer.json()["detail"], answer.text
    with pytest.raises(BrokerUnavailable):  # so a worker waits for it, and does not end
        broker.claim("w", (TaskKind.plan,))
    for use in (lambda: connect(database_url), lambda: upgrade(database_url)):
        with pytest.raises(Unavailable, match="The database is damaged"):
            use()


def test_polls_are_no_news_in_the_log(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker asks every two seconds: that made 20 MB of log a day."""
    told: dict[str, int] = {}
    monkeypatch.setattr(observing.log, "log", lambda level, _, **more: told.update({more["path"]: level}))
    worker = {VERSION: spoken_version()}
    for path in ("/healthz", "/v1/jobs", "/nothing"):
        api.get(path)
    api.post("/internal/v1/claim", json={"worker_id": "w", "kinds": ["plan"]}, headers=worker)
    api.post("/internal/v1/renew", json={}, headers=worker)
    assert told == {
        "/healthz": logging.DEBUG,
        "/v1/jobs": logging.INFO,
        "/nothing": logging.INFO,
        "/internal/v1/claim": logging.DEBUG,
        "/internal/v1/renew": logging.INFO,
    }, "what is refused is news"


def test_workers_of_another_version_are_told_once(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """For users there is no worker, and only the workers' own logs said why."""
    said = list[str]()
    internal._tell_of.cache_clear()
    monkeypatch.setattr(internal.log, "warning", lambda _, **told: said.append(told["theirs"]))
    for _ in range(2):
        for version in ("0.0.9+1", "0.0.9+2"):
            assert api.post("/internal/v1/claim", json={}, headers={VERSION: version}).status_code == 426
    assert said == ["0.0.9+1", "0.0.9+2"]

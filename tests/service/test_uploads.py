"""Datasets that are sent: kept by digest, refused when damaged, used by a job, fetched by a distant worker."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from service import uploads
from service.api import create_app
from service.contract.internal import VERSION, spoken_version
from service.contract.job import JobSpec
from service.contract.task import PlanClaim
from service.errors import BadUpload, BrokerUnavailable, Misconfigured, OtherVersion, SlowBody
from service.queue import Queue
from service.remote import RemoteBroker
from service.settings import Settings
from service.uploads import prune
from tests.service.conftest import here

Make = Callable[..., dict[str, Any]]
DATA = b'{"prompt": "a", "completion": "b"}\n' * 50
DIGEST = hashlib.sha256(DATA).hexdigest()
OCTETS = {"Content-Type": "application/octet-stream"}


def send(api: TestClient, data: bytes = DATA, **query: str) -> Any:
    return api.post("/v1/datasets", params={"name": "d.jsonl"} | query, content=data, headers=OCTETS)


def test_what_was_sent_is_what_a_job_reads(api: TestClient, settings: Settings, job: Make) -> None:
    first, again = send(api), send(api, sha256=DIGEST)
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json() == {"source": f"upload:{DIGEST}.jsonl", "sha256": DIGEST, "bytes": len(DATA)}
    assert [file.name for file in settings.uploads.iterdir()] == [f"{DIGEST}.jsonl"]
    spec = job(dataset={"source": first.json()["source"], "max_length": 64})
    assert api.post("/v1/jobs", json=spec).status_code == 202
    broken = send(api, b"not json\n").json()["source"]
    refused = api.post("/v1/jobs", json=job(dataset={"source": broken, "max_length": 64}))
    assert refused.status_code == 422 and refused.json()["errors"][0]["pointer"] == "/dataset/source"
    for source in (f"upload:{'0' * 64}.jsonl", "upload:../../etc/passwd", "upload:x"):
        refused = api.post("/v1/jobs", json=job(dataset={"source": source, "max_length": 64}))
        assert refused.status_code == 422, source


def test_what_no_job_names_is_kept_for_a_day(api: TestClient, settings: Settings, job: Make, queue: Queue) -> None:
    named, old, new = (send(api, data).json()["source"].removeprefix("upload:") for data in (DATA, DATA * 2, DATA * 3))
    assert api.post("/v1/jobs", json=job(dataset={"source": f"upload:{named}", "max_length": 64})).status_code == 202
    (settings.uploads / ".partial-x").touch()
    for name in (named, old, ".partial-x"):
        os.utime(settings.uploads / name, (1.0, 1.0))
    assert queue.prune_uploads(settings.uploads) == 2
    assert {file.name for file in settings.uploads.glob("*.jsonl")} == {named, new}
    os.utime(settings.uploads / new, (1.0, 1.0))
    assert send(api, DATA * 3).status_code == 201 and queue.prune_uploads(settings.uploads) == 0, "it was sent again"


@pytest.mark.parametrize("prunes", [True, False])
def test_a_control_plane_of_a_single_tune_deletes_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, prunes: bool
) -> None:
    """Its database knows no other job, and the folder is that of the user's own control plane."""
    rounds, pruned, enough = list[int](), list[Path](), threading.Event()

    def prune(*_: Any) -> int:
        rounds.append(1)
        if len(rounds) > 2 and (pruned or not prunes):
            enough.set()
        return 0

    def prune_uploads(_: Queue, folder: Path) -> int:
        pruned.append(folder)
        return 0

    monkeypatch.setattr(Queue, "prune", prune)
    monkeypatch.setattr(Queue, "prune_uploads", prune_uploads)
    monkeypatch.setattr("service.api.app.PRUNE_SECONDS", 0.01)
    with TestClient(create_app(settings, prunes_uploads=prunes)):
        assert enough.wait(30)
    assert set(pruned) == ({settings.uploads} if prunes else set())


def test_a_full_disk_is_told(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("service.uploads._partial", full)
    answer = send(api)
    assert answer.status_code == 503 and "disk is full" in answer.json()["detail"], answer.text


def test_what_is_refused_leaves_nothing(settings: Settings) -> None:
    with here(settings.model_copy(update={"upload_mib": 1})) as api:
        for answer, words in (
            (send(api, b""), "is empty"),
            (send(api, b"x" * ((1 << 20) + 1)), "larger than the 1 MiB"),
            (send(api, sha256="0" * 64), "send it again"),
            (send(api, name="d.exe"), "must end in one of"),
        ):
            assert answer.status_code == 422 and words in answer.json()["detail"], answer.text
        for kind in ("text/plain", "application/json"):
            answer = api.post("/v1/datasets?name=d.jsonl", content=DATA, headers={"Content-Type": kind})
            assert answer.status_code == 415, kind
            assert "must be application/octet-stream" in answer.json()["detail"]
    assert not settings.uploads.exists() or not list(settings.uploads.iterdir())


def test_an_upload_is_found_by_its_name_only(api: TestClient, settings: Settings, job: Make) -> None:
    """Whoever sent it knows the name. By the folder's path anybody would read what all have sent."""
    name = send(api).json()["source"].removeprefix("upload:")
    for source in (settings.uploads, settings.uploads / name):
        refused = api.post("/v1/jobs", json=job(dataset={"source": str(source), "max_length": 64}))
        assert refused.status_code == 422 and "outside the allowed folders" in refused.json()["detail"]
    missing = api.post("/v1/jobs", json=job(dataset={"source": f"upload:{'0' * 64}.jsonl", "max_length": 64}))
    assert missing.status_code == 422 and str(settings.uploads) not in missing.text


def test_an_upload_that_stops_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "CHUNK_SECONDS", 0.01)

    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.Event().wait()

    with pytest.raises(SlowBody, match="Nothing of the data arrived"):
        asyncio.run(uploads.receive(tmp_path, chunks(), ".jsonl", None, 10, 0))
    assert not list(tmp_path.iterdir())


def test_a_distant_worker_fetches_it_once(api: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = send(api).json()["source"]
    broker = RemoteBroker("http://127.0.0.1:8000", None, api)  # type: ignore[arg-type]
    folder = tmp_path / "worker"
    broker.fetch(source, folder)
    (copy,) = folder.glob("*.jsonl")
    assert copy.read_bytes() == DATA and copy.name == source.removeprefix("upload:")
    monkeypatch.setattr(broker, "_http", None)
    broker.fetch(source, folder)  # it is there
    broker.fetch("data/local.jsonl", folder)  # nothing that was sent
    monkeypatch.undo()
    broker.fetch(f"upload:{'0' * 64}.jsonl", folder)  # the trial says that it is not there
    assert list(folder.glob("*.jsonl")) == [copy]
    assert api.get("/internal/v1/uploads/..%2Ftest.db", headers={VERSION: spoken_version()}).status_code == 404


def test_a_worker_is_told_why_it_may_not_fetch(api: TestClient, tmp_path: Path) -> None:
    """It waits for a control plane of its version, as with every other call."""
    source = send(api).json()["source"]
    broker = RemoteBroker("http://127.0.0.1:8000", None, api)  # type: ignore[arg-type]
    broker._headers = {VERSION: "0.0"}
    with pytest.raises(OtherVersion):
        broker.fetch(source, tmp_path / "worker")


def test_a_proxy_s_page_is_an_outage(tmp_path: Path) -> None:
    """Some answer 404 while what they stand before starts again; the upload is there afterwards."""
    page = httpx.MockTransport(lambda _: httpx.Response(404, text="404 not here"))
    with httpx.Client(transport=page, base_url="http://proxy") as client:
        broker = RemoteBroker("http://proxy", None, client)
        with pytest.raises(BrokerUnavailable, match="404 from http://proxy"):
            broker.fetch(f"upload:{'0' * 64}.jsonl", tmp_path)


def test_what_a_proxy_finds_too_large_is_not_sent_for_ever(spec: Callable[..., JobSpec]) -> None:
    claim = PlanClaim(task_id="t", attempt=1, job_id="j", spec=spec())
    page = httpx.MockTransport(lambda _: httpx.Response(413, text="<html>413 Request Entity Too Large</html>"))
    with httpx.Client(transport=page, base_url="http://proxy") as client:
        broker = RemoteBroker("http://proxy", None, client)
        with pytest.raises(Misconfigured, match=r"A proxy before http://proxy takes no bodies of this size \(413\)"):
            broker.fail(claim, "it broke", "a log")


def test_a_copy_that_was_damaged_on_the_way_is_not_kept(api: TestClient, settings: Settings, tmp_path: Path) -> None:
    source = send(api).json()["source"]
    file = settings.uploads / source.removeprefix("upload:")
    file.write_bytes(DATA[:-1])
    with pytest.raises(BadUpload, match="What arrived has the SHA-256 digest"):
        RemoteBroker("http://127.0.0.1:8000", None, api).fetch(source, tmp_path / "w")  # type: ignore[arg-type]
    assert list((tmp_path / "w").glob("*.jsonl")) == []
    assert send(api).json()["source"] == source and file.read_bytes() == DATA, "sent again, it is whole again"


def test_what_is_no_upload_does_not_keep_others_from_being_removed(tmp_path: Path) -> None:
    """The root of a disk has a folder lost+found."""
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "old.jsonl").write_text("{}")
    assert prune(tmp_path, "a database", time.time() + 60, set) == 1
    assert {one.name for one in tmp_path.iterdir()} == {"lost+found", ".owner"}


def test_another_database_s_uploads_are_kept(tmp_path: Path) -> None:
    """A control plane that is started once with another DYNOTUNE_DATABASE_URL knows none of the jobs that name them."""
    (tmp_path / "a.jsonl").touch()
    assert prune(tmp_path, "mine", time.time() + 60, lambda: {"a.jsonl"}) == 0
    assert prune(tmp_path, "another", time.time() + 60, set) == 0
    assert prune(tmp_path, "mine", time.time() + 60, set) == 1


def test_a_worker_deletes_copies_that_no_task_has_used_for_a_day(api: TestClient, tmp_path: Path) -> None:
    """But nothing in a folder that it shares with a control plane, whose jobs it does not know."""
    broker = RemoteBroker("http://127.0.0.1:8000", None, api)  # type: ignore[arg-type]
    names = [send(api, DATA * count).json()["source"] for count in (1, 2, 3)]
    own, shared = tmp_path / "own", tmp_path / "shared"
    shared.mkdir()
    (shared / "d.jsonl").touch()
    for folder in (own, shared):
        for source in names[:2]:
            broker.fetch(source, folder)
        for file in folder.glob("*.jsonl"):
            os.utime(file, (1.0, 1.0))
        broker.fetch(names[0], folder)  # is used again
        broker.fetch(names[2], folder)
    first, second, third = (name.removeprefix("upload:") for name in names)
    assert {file.name for file in own.glob("*.jsonl")} == {first, third}
    assert {file.name for file in shared.glob("*.jsonl")} == {first, second, third, "d.jsonl"}
    assert prune(own, "a control plane's database", time.time() + 60, set) == 2, "which takes the folder over"
    broker.fetch(names[0], own)
    os.utime(own / first, (1.0, 1.0))
    broker.fetch(names[1], own)
    assert (own / first).exists()


def test_the_disk_keeps_what_the_database_needs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is received where too little is free, and no more than a few MiB once others have filled the disk."""
    free = [1 << 30, 1 << 30, 1]
    monkeypatch.setattr("service.uploads.shutil.disk_usage", lambda _: SimpleNamespace(free=free.pop(0) if free else 1))
    with here(settings.model_copy(update={"min_free_disk_gib": 0.5, "upload_mib": 64})) as api:
        assert send(api, b"x" * (9 << 20)).status_code == 201
        for size in (17 << 20, 1):
            answer = send(api, b"x" * size)
            assert answer.status_code == 503 and "has less than the 0.5 GiB free" in answer.json()["detail"], (
                answer.text
            )
    assert len(list(settings.uploads.iterdir())) == 1

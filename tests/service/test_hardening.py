"""What a reviewer got past: keys in logs, work before a key is checked, waiting that is not ended, reapers that die."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from service import __version__, access, logs
from service.access import Scope
from service.api import app
from service.api import events as api_events
from service.api.app import _every
from service.api.watching import EventWatch
from service.cli import embedded
from service.cli.tune import private
from service.contract.estimate import EstimateRequest
from service.contract.hardware import HardwareFacts
from service.contract.internal import VERSION, spoken_version
from service.contract.job import JobSpec
from service.contract.task import PlanClaim, TaskKind
from service.db import reading
from service.errors import Misconfigured, TooMany
from service.metrics import KEPT_SECONDS, Metrics
from service.models import Job, Task
from service.ownkey import api_key
from service.patience import Patience
from service.queue import Queue
from service.settings import Settings
from tests.service.conftest import here
from tests.service.test_access import bearing
from tests.service.test_api import submit

Make = Callable[..., dict[str, Any]]
Facts = Callable[..., HardwareFacts]
PLANS = (TaskKind.plan,)


@pytest.fixture
def locked(settings: Settings) -> Iterator[TestClient]:
    """An API that asks for keys, and answers also where it fails."""
    with here(settings.model_copy(update={"require_keys": True}), raises=False) as client:
        yield client


def test_a_traceback_in_the_log_has_no_key(
    locked: TestClient,
    engine: Engine,
    job: Make,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = access.create(engine, "ann", [Scope.submit])
    path = locked.post("/v1/jobs", json=job(), headers=bearing(key)).headers["location"]
    monkeypatch.setattr("service.jobs.view", lambda *_: 1 / 0)
    root = logging.getLogger()
    before, level = root.handlers, root.level
    try:
        logs.show("text", "info")
        answer = locked.get(path, headers=bearing(key))
    finally:
        root.handlers = before
        root.setLevel(level)
    said = capsys.readouterr().err
    assert answer.status_code == 500 and answer.headers["x-request-id"] in said and "Traceback" in said
    assert key.split("_", 2)[2] not in said and answer.headers["x-content-type-options"] == "nosniff"


def test_an_own_key_is_cleaned_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, known in ((" dyno_a_b\n", "dyno_a_b"), ("", None), ("\n", None)):
        monkeypatch.setenv("DYNOTUNE_KEY", given)
        assert api_key() == known
    for wrong in ("dyno_secr\u00e9t", "dyno_sec ret", "dyno_sec\nret"):
        monkeypatch.setenv("DYNOTUNE_KEY", wrong)
        with pytest.raises(Misconfigured, match="DYNOTUNE_KEY holds characters") as told:
            api_key()
        assert "sec" not in str(told.value)
    monkeypatch.setenv("DYNOTUNE_ADMIN_KEY", "short-secret")
    with pytest.raises(Misconfigured, match="at least 20 characters long") as told:
        Settings.from_environment()
    assert "short-secret" not in str(told.value)


def test_a_secret_of_the_settings_may_end_with_a_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("admin_key", "webhook_key"):
        for given, known in ((f" {'k' * 20}\n", "k" * 20), ("\n", None)):
            monkeypatch.setenv(f"DYNOTUNE_{name.upper()}", given)
            found = getattr(Settings.from_environment(), name)
            assert (found and found.get_secret_value()) == known
        monkeypatch.setenv(f"DYNOTUNE_{name.upper()}", f" {'k' * 19} \n")
        with pytest.raises(Misconfigured, match="at least 20 characters long"):
            Settings.from_environment()
        monkeypatch.delenv(f"DYNOTUNE_{name.upper()}")


@pytest.mark.parametrize("character", [" ", "\n", "\u00e9", "\x7f"])
def test_an_admin_key_that_no_header_holds_is_refused(monkeypatch: pytest.MonkeyPatch, character: str) -> None:
    monkeypatch.setenv("DYNOTUNE_ADMIN_KEY", f"secret{character}{'k' * 20}")
    with pytest.raises(Misconfigured, match="must be at least 20 characters long, of ASCII without spaces") as told:
        Settings.from_environment()
    assert "secret" not in str(told.value) and "kkk" not in str(told.value)


def test_no_body_of_a_worker_is_read_without_a_key(locked: TestClient) -> None:
    def body() -> Any:
        raise AssertionError("the body was read")
        yield b""

    for headers in ({}, {VERSION: spoken_version()}, bearing("dyno_no")):
        kind = {"Content-Type": "application/json"}
        answer = locked.post("/internal/v1/claim", content=body(), headers=headers | kind)
        assert answer.status_code in (401, 426), answer.text


def test_what_workers_say_is_checked(api: TestClient) -> None:
    version = {VERSION: spoken_version(), "Content-Type": "application/json"}
    worker = {"worker_id": "w", "kinds": ["plan"]}
    for body in ("[[" * 3000, "\ufffd", "[]", "{}", '{"worker_id": "w", "kinds": []}'):
        answer = api.post("/internal/v1/claim", content=body, headers=version)
        assert answer.status_code == 400 and answer.json()["code"] == "malformed-body", answer.text
    for wrong in ({"kinds": ["plan"] * 9}, {"worker_id": "w" * 99}, {"kinds": ["none"]}):
        assert api.post("/internal/v1/claim", json=worker | wrong, headers=version).status_code == 400
    assert api.post("/internal/v1/claim", json=worker, headers={VERSION: "0"}).status_code == 426
    assert api.post("/internal/v1/claim", json=worker, headers=version).json() == {"claim": None}


def test_made_up_methods_and_paths_make_no_series(api: TestClient) -> None:
    for number in range(20):
        api.request(f"X{number}", f"/{number}")
    said = api.get("/metrics").text
    assert "X1" not in said and '"/1"' not in said and 'method="other"' in said


def test_the_local_worker_inherits_no_key_and_no_other_server(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    for name in ("SERVER", "KEY", "ADMIN_KEY"):
        monkeypatch.setenv(f"DYNOTUNE_{name}", "x")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **options: started.append(options["env"]))
    embedded.LocalWorker(settings)
    assert started[0]["DYNOTUNE_DATABASE_URL"] == settings.database_url
    assert not {"DYNOTUNE_SERVER", "DYNOTUNE_KEY", "DYNOTUNE_ADMIN_KEY"} & started[0].keys()


def test_a_job_of_ones_own_needs_no_key(settings: Settings, job: Make) -> None:
    with private(settings.model_copy(update={"require_keys": True}), job()) as own:
        assert not own.require_keys and own.admin_key is None


def test_a_row_that_cannot_be_read_keeps_no_other_waiting(
    queue: Queue, engine: Engine, facts: Facts, job: Make
) -> None:
    broken, sound = (queue.submit(JobSpec.model_validate(job())) for _ in range(2))
    queue.register("w", 1, facts())
    assert queue.claim("w", PLANS) is not None and queue.claim("w", PLANS) is not None
    with Session(engine) as session, session.begin():
        session.execute(update(Task).values(lease_until=1.0))
        session.execute(update(Job).where(Job.id == broken).values(spec={"unknown": 1}))
    assert queue.reap() == 1
    claim = queue.claim("w", PLANS)
    assert isinstance(claim, PlanClaim) and claim.job_id == sound


def test_the_reaper_outlives_a_mistake() -> None:
    rounds: list[int] = []

    async def work() -> None:
        rounds.append(1)
        raise ValueError("a mistake")

    async def run() -> None:
        over = asyncio.Event()
        task = asyncio.create_task(_every(0.0, work, over))
        while len(rounds) < 3:
            await asyncio.sleep(0)
        over.set()
        await task

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_end_waits_for_the_reaper(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has a connection, which the end of the control plane would otherwise close while it is used."""
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def reap(_: Queue) -> int:
        begun.set()
        assert may_end.wait(20)
        ended.set()
        return 0

    seen: list[bool] = []
    close = EventWatch.close

    async def closed(watch: EventWatch) -> None:  # the last that is done before the connections are closed
        seen.append(ended.is_set())
        await close(watch)

    monkeypatch.setattr(Queue, "reap", reap)
    monkeypatch.setattr(EventWatch, "close", closed)
    monkeypatch.setattr(app, "REAP_SECONDS", 0.01)
    monkeypatch.setattr(app, "Patience", lambda: Patience(0.0))
    with here(settings):
        assert begun.wait(20)
        threading.Timer(0.2, may_end.set).start()  # while the end waits
    assert seen == [True]


def test_an_estimate_belongs_to_its_owner(locked: TestClient, engine: Engine) -> None:
    ann, bob = (bearing(access.create(engine, owner, [Scope.submit])) for owner in ("ann", "bob"))
    spec = {"model": {"source": "model"}, "dataset": {"source": "data.jsonl", "max_length": 64}}
    sent = locked.post("/v1/estimates", json={"spec": spec, "memory_gib": 1}, headers=ann)
    path = sent.headers["location"]
    assert locked.get(path, headers=bob).status_code == 404
    assert locked.post(f"{path}/cancel", headers=bob).status_code == 404
    assert locked.get(path, headers=ann).json()["state"] == "queued"


def test_open_jobs_are_counted_one_submission_after_the_other(queue: Queue, engine: Engine, job: Make) -> None:
    key = access.create(engine, "ann", [Scope.submit], most_open_jobs=2)
    with Session(engine) as session:
        caller = access.caller(session, key)
    assert caller is not None
    refused: list[TooMany] = []

    def one() -> None:
        try:
            queue.submit(JobSpec.model_validate(job()), caller)
        except TooMany as error:
            refused.append(error)

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Session(engine) as session:
        assert len(session.scalars(select(Job)).all()) == 2 and len(refused) == 4


def test_open_estimates_count_as_open_jobs(queue: Queue, engine: Engine, job: Make) -> None:
    key = access.create(engine, "ann", [Scope.submit], most_open_jobs=2)
    with Session(engine) as session:
        caller = access.caller(session, key)
    assert caller is not None
    request = EstimateRequest(spec=JobSpec.model_validate(job()), memory_gib=1)
    first, _ = (queue.submit_estimate(request, caller) for _ in range(2))
    with pytest.raises(TooMany, match="2 open jobs and estimates"):
        queue.submit_estimate(request, caller)
    with pytest.raises(TooMany, match="2 open jobs and estimates"):
        queue.submit(request.spec, caller)
    queue.cancel_estimate(first, caller)
    queue.submit(request.spec, caller)


def test_waiting_ends_with_the_job_the_server_and_news_of_this_job_only(
    queue: Queue, engine: Engine, job: Make
) -> None:
    first, second = (queue.submit(JobSpec.model_validate(job())) for _ in range(2))

    async def run() -> None:
        watch = EventWatch(engine)
        await watch.wait(first, 0, 20)  # it has an event
        waiting = asyncio.create_task(watch.wait(first, 10**6, 20))
        await asyncio.to_thread(queue.cancel, second)
        await asyncio.sleep(0.6)  # two looks: the other job's event wakes nobody
        assert not waiting.done()
        await asyncio.to_thread(queue.cancel, first)
        await asyncio.to_thread(queue.delete, first)
        await waiting
        closing = asyncio.create_task(watch.wait(second, 10**6, 20))
        await asyncio.sleep(0)
        await watch.close()
        await closing

    asyncio.run(asyncio.wait_for(run(), 15))


def test_a_stream_ends_with_its_key(locked: TestClient, queue: Queue, engine: Engine, job: Make) -> None:
    key = access.create(engine, "ann", [Scope.submit])
    path = locked.post("/v1/jobs", json=job(), headers=bearing(key)).headers["location"]

    def revoke_and_cancel() -> None:
        access.revoke(engine, key.split("_")[1])
        queue.cancel(path.rpartition("/")[2])

    threading.Timer(0.5, revoke_and_cancel).start()
    said = locked.get(f"{path}/events/stream", headers=bearing(key)).text
    assert "event: submitted" in said and "event: cancelled" not in said


def test_a_key_follows_so_many_jobs_at_a_time(
    locked: TestClient, engine: Engine, queue: Queue, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who opens more than the service can serve keeps nobody else from following theirs."""
    monkeypatch.setattr(api_events, "MOST_STREAMS", 1)
    ann, bob = (access.create(engine, owner, [Scope.submit]) for owner in ("ann", "bob"))
    with reading(engine) as session:
        caller = access.caller(session, ann)
    assert caller is not None
    streams = locked.app.state.context.streams  # type: ignore[attr-defined]
    streams[caller.id] = 1
    refused = locked.get(f"/v1/jobs/{'0' * 32}/events/stream", headers=bearing(ann))
    assert refused.status_code == 429 and "1 streams are open already" in refused.json()["detail"]
    assert locked.get(f"/v1/jobs/{'0' * 32}/events/stream", headers=bearing(bob)).status_code == 404
    assert dict(+streams) == {caller.id: 1}, "what was refused or has ended is not counted"

    async def opened() -> list[int]:
        counts = []
        async for _ in api_events.counted_stream(locked.app.state.context, access.ANYBODY):  # type: ignore[attr-defined]
            counts.append(streams[""])
        return [*counts, streams[""]]

    assert asyncio.run(opened()) == [1, 0]


def test_the_head_of_a_stream_ends(api: TestClient, job: Make) -> None:
    answer = api.head(f"/v1/jobs/{submit(api, job())}/events/stream")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")


def test_every_form_of_a_tag_matches(api: TestClient, job: Make) -> None:
    path = f"/v1/jobs/{submit(api, job())}"
    tag = api.get(path).headers["etag"]
    for form in (tag, tag.removeprefix("W/"), "*", f'"x" , {tag}'):
        assert api.get(path, headers={"If-None-Match": form}).status_code == 304, form
    assert api.get(path, headers={"If-None-Match": '"x"'}).status_code == 200


def test_numbers_beyond_what_databases_count(api: TestClient, job: Make) -> None:
    path = f"/v1/jobs/{submit(api, job())}"
    for where in (f"{path}/events?after=2147483648", "/v1/jobs?cursor=2147483648", f"{path}?since=2147483648"):
        answer = api.get(where)
        assert answer.status_code == 422 and "NUL" not in answer.json()["detail"], where
    late = api.get(f"{path}/events/stream", headers={"Last-Event-ID": "2147483648"})
    assert late.status_code == 422


def test_a_task_of_an_ended_job_is_not_handed_on(queue: Queue, facts: Facts, job: Make) -> None:
    job_id = queue.submit(JobSpec.model_validate(job()))
    queue.register("w", 1, facts())
    assert queue.claim("w", PLANS) is not None
    queue.cancel(job_id)
    queue.unheard("w")
    assert queue.claim("w", PLANS) is None


def test_a_repeated_submission_is_not_looked_at_again(api: TestClient, job: Make, root: Any) -> None:
    key = {"Idempotency-Key": "k"}
    first = api.post("/v1/jobs", json=job(), headers=key).json()
    copies = [api.post(f"/v1/jobs/{first['id']}/clone", headers={"Idempotency-Key": "c"}).json() for _ in range(2)]
    (root / "data.jsonl").unlink()
    assert api.post("/v1/jobs", json=job(), headers=key).json() == first
    assert copies[0] == copies[1] != first
    wrong = api.post(f"/v1/jobs/{first['id']}/clone", json=[])
    assert wrong.status_code == 400 and "what changes in the job" in wrong.json()["detail"]


def test_metrics_of_the_queue_are_counted_once_for_all_who_ask(engine: Engine, queue: Queue, spec: Any) -> None:
    """With a million trials that takes seconds, and scrapers do not wait for one another."""
    now = [0.0]
    metrics = Metrics(engine, lambda: now[0])
    assert b'dynotune_jobs{status="queued"}' not in metrics()
    queue.submit(spec())
    now[0] = KEPT_SECONDS - 1
    assert b'dynotune_jobs{status="queued"}' not in metrics()
    now[0] = KEPT_SECONDS
    assert b'dynotune_jobs{status="queued"} 1.0' in metrics()


def test_a_worker_of_another_commit_is_told(api: TestClient) -> None:
    """The number of the version says nothing of what changed since: the first new field would fail every task."""
    stale = {VERSION: f"{__version__}+00000000"}
    answer = api.post("/internal/v1/claim", json={"worker_id": "w", "kinds": ["plan"]}, headers=stale)
    assert answer.status_code == 426 and spoken_version() in answer.json()["detail"]

"""The REST API on both databases, from submission to recommendation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from service import jobs
from service.api.problems import MEDIA
from service.client import Client
from service.contract.hardware import HardwareFacts
from service.contract.states import JobPhase, Origin
from service.contract.task import (
    PlanClaim,
    PlanDecision,
    TaskKind,
    TrialClaim,
    TrialRequest,
    VerifyClaim,
    VerifyRequest,
)
from service.contract.views import EventList, TrialList, WorkerList
from service.errors import BadQuery, InvalidJob, KeyReused
from service.levers import LEVERS
from service.queue import Queue
from service.settings import Settings
from service.tasks import TASKS
from tests.factory import configuration, measured, store_best

Make = Callable[..., dict[str, Any]]
Facts = Callable[..., HardwareFacts]


def submit(api: TestClient, body: dict[str, Any]) -> str:
    answer = api.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    return str(answer.json()["id"])


def run_trial(queue: Queue, seconds: float, number: int, **levers: Any) -> str:
    """Plan one trial, claim it and finish it, as a worker would; its id."""
    made = configuration(**levers)
    plan = queue.claim("w", (TaskKind.plan,))
    assert isinstance(plan, PlanClaim)
    queue.plan_input(plan)
    request = TrialRequest(configuration=made, origin=Origin.recipe, number=number)
    queue.finish_plan(plan, PlanDecision(trials=(request,), phase=JobPhase.searching, planned_trials=9))
    trial = queue.claim("w", (TaskKind.trial,))
    assert isinstance(trial, TrialClaim)
    queue.renew(trial, "timing", "so far")
    queue.finish_trial(trial, measured(made, seconds), "its output")
    return trial.task_id


def test_yaml_and_json_mean_the_same(api: TestClient, job: Make) -> None:
    first = submit(api, job())
    text = "name: test\nmodel: {source: model, weights: random}\ndataset: {source: data.jsonl, max_length: 512}\n"
    text += "training: {effective_batch_size: 32}\n"
    second = api.post("/v1/jobs", content=text, headers={"Content-Type": "application/yaml"}).json()["id"]
    specs = [api.get(f"/v1/jobs/{one}").json()["spec"] for one in (first, second)]
    assert specs[0] == specs[1]


def test_a_job_from_submission_to_recommendation(api: TestClient, job: Make, queue: Queue, facts: Facts) -> None:
    job_id = submit(api, job())
    queued = api.get(f"/v1/jobs/{job_id}").json()
    assert queued["status"] == "queued" and "No worker is connected" in queued["waiting_for"]
    early = api.get(f"/v1/jobs/{job_id}/recommendation")
    assert early.status_code == 409 and early.json()["code"] == "not-yet"

    queue.register("w", 1, facts())
    trial_id = run_trial(queue, 8.0, 1)
    store_best(queue.engine, job_id, measured(configuration(), 8.0))
    running = api.get(f"/v1/jobs/{job_id}").json()
    assert running["status"] == "running" and running["phase"] == "searching"
    assert running["progress"]["trials"] == {"ok": 1} and running["progress"]["planned"] == 9
    assert running["best"]["tokens_per_second"] == 12_800 / 8 and running["estimated_finish_at"] > 0
    assert api.get(f"/v1/jobs/{job_id}/recommendation").json()["final"] is False

    trials = api.get(f"/v1/jobs/{job_id}/trials").json()["items"]
    assert [one["id"] for one in trials] == [trial_id] and trials[0]["fastest"] is True
    assert api.get(f"/v1/trials/{trial_id}").json()["log"] == "its output"
    kinds = [event["kind"] for event in api.get(f"/v1/jobs/{job_id}/events").json()["items"]]
    assert kinds == ["submitted", "started", "trial"]
    last = api.get(f"/v1/jobs/{job_id}/events", params={"after": 2}).json()["items"]
    assert all(event["seq"] > 2 for event in last)

    assert api.post(f"/v1/jobs/{job_id}/stop").json()["status"] == "succeeded"
    final = api.get(f"/v1/jobs/{job_id}/recommendation").json()
    assert final["final"] is True and final["configuration"]["micro_batch_size"] == 8
    assert api.post(f"/v1/jobs/{job_id}/stop").status_code == 409
    for name, word in (
        ("json", "schema_version"),
        ("spec", "max_length"),
        ("train.py", "import torch"),
        ("axolotl", "sequence_len"),
    ):
        assert word in api.get(f"/v1/jobs/{job_id}/exports/{name}").text
    assert api.get(f"/v1/jobs/{job_id}/exports/none").status_code == 404


def test_looking_at_a_running_job_computes_no_recommendation(
    api: TestClient, job: Make, queue: Queue, facts: Facts
) -> None:
    """Only what the queue stored is shown: nothing after it was removed, and later another than the trial's."""
    job_id = submit(api, job())
    queue.register("w", 1, facts())
    run_trial(queue, 8.0, 1)
    with Session(queue.engine) as session, session.begin():
        jobs.get(session, job_id).recommendation = None
    assert api.get(f"/v1/jobs/{job_id}").json()["best"] is None
    store_best(queue.engine, job_id, measured(configuration(batching="sorted"), 4.0))
    assert api.get(f"/v1/jobs/{job_id}").json()["best"]["levers"]["batching"] == "sorted"
    assert "sorted" in api.get(f"/v1/jobs/{job_id}/exports/train.py").text


def test_lists_are_paged_and_filtered(api: TestClient, job: Make) -> None:
    ids = [submit(api, job(labels={"team": "a" if number % 2 else "b"})) for number in range(5)]
    page = api.get("/v1/jobs", params={"limit": 2}).json()
    seen = [one["id"] for one in page["items"]]
    while page["next"]:
        page = api.get("/v1/jobs", params={"limit": 2, "cursor": page["next"]}).json()
        seen += [one["id"] for one in page["items"]]
    assert seen == ids[::-1]
    labelled = api.get("/v1/jobs", params={"label": "team=a"}).json()["items"]
    assert [one["id"] for one in labelled] == [ids[3], ids[1]]
    named = submit(api, job(name="\u00c9t\u00e9 \u0418\u043b\u044c\u0438\u0447"))
    for part in ("\u00e9T\u00c9", "\u0418\u041b\u042c"):
        found = api.get("/v1/jobs", params={"name": part}).json()["items"]
        assert [one["id"] for one in found] == [named], "upper and lower case are of all alphabets"
    api.post(f"/v1/jobs/{ids[0]}/cancel")
    cancelled = api.get("/v1/jobs", params={"status": "cancelled"}).json()["items"]
    assert [one["id"] for one in cancelled] == [ids[0]]


def test_a_list_reads_no_more_than_it_shows(api: TestClient, job: Make) -> None:
    submit(api, job())
    said = list[str]()

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        assert len(api.get("/v1/jobs").json()["items"]) == 1
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    reads = [one for one in said if "FROM jobs" in one]
    assert len(reads) == 1 and not any(f"jobs.{name}" in reads[0] for name in ("recommendation", "facts", "notes"))


def test_a_job_nobody_can_serve_says_why(api: TestClient, job: Make, queue: Queue, facts: Facts) -> None:
    queue.register("w", 1, facts())
    for hardware, words in (
        ({"device": "cuda"}, "is a cpu worker, the job wants cuda"),
        ({"name": "H200"}, "the job wants H200"),
        ({"memory_gib": 64}, "the job wants 64"),
    ):
        job_id = submit(api, job(hardware=hardware))
        found = api.get(f"/v1/jobs/{job_id}").json()
        assert found["status"] == "queued" and words in found["waiting_for"]


def test_levers_tell_what_each_worker_offers(api: TestClient, queue: Queue, facts: Facts) -> None:
    queue.register("w", 1, facts(packages={}))
    found = api.get("/v1/levers").json()
    assert [lever["name"] for lever in found["levers"]] == list(LEVERS)
    states = {
        (lever["name"], choice["name"]): choice["workers"]["w"]
        for lever in found["levers"]
        for choice in lever["choices"]
    }
    assert states["attention", "sdpa"] == {"available": True, "why_not": None}
    assert "NVIDIA GPU" in states["precision", "tf32"]["why_not"]
    assert "pip install bitsandbytes" in states["optimizer", "adamw-8bit"]["why_not"]
    assert found["exclusions"] and found["tasks"] == sorted(TASKS)
    (worker,) = api.get("/v1/workers").json()["items"]
    assert worker["alive"] and worker["facts"]["name"] == "Test CPU"


def test_a_verification_says_when_it_will_end(api: TestClient, job: Make, queue: Queue, facts: Facts) -> None:
    """It is expected to take longer than the job's minutes, and the time that is left says so."""
    job_id = submit(api, job(search={"minutes": 1}))
    queue.register("w", 1, facts())
    run_trial(queue, 8.0, 1)
    best = measured(configuration(), 8.0)
    request = VerifyRequest(
        method="lora", baseline=None, finalists=(best,), blocks=2, seconds_limit=20, expected_seconds=300
    )
    planning = queue.claim("w", (TaskKind.plan,))
    assert isinstance(planning, PlanClaim)
    queue.finish_plan(planning, PlanDecision(verify=request, phase=JobPhase.verifying))
    assert isinstance(queue.claim("w", (TaskKind.verify,)), VerifyClaim)
    left = api.get(f"/v1/jobs/{job_id}").json()["estimated_finish_at"] - time.time()
    assert 240 < left <= 300


def test_health(api: TestClient, settings: Settings) -> None:
    assert api.get("/healthz").json() == {"status": "ok"}
    assert api.get("/readyz").json()["status"] == "ok"


def test_ready_while_somebody_writes(api: TestClient, engine: Engine) -> None:
    """The check takes no write lock; on SQLite it would wait 30 s for the other transaction's."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE workers SET state = 'idle'"))
        assert api.get("/readyz").status_code == 200


def test_a_worker_lives_by_the_clock_that_its_signs_are_written_with(
    api: TestClient, queue: Queue, facts: Facts, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    queue.register("w", 1, facts())
    if database_url.startswith("postgresql"):  # where the machine's clock may be another
        monkeypatch.setattr(time, "time", lambda: 4e9)
    (worker,) = api.get("/v1/workers").json()["items"]
    assert worker["alive"]


def test_openapi_describes_the_job_and_its_errors(api: TestClient) -> None:
    schema = api.get("/openapi.json").json()
    post = schema["paths"]["/v1/jobs"]["post"]
    assert "example" in post["requestBody"]["content"]["application/json"]
    assert {"202", "400", "413", "422"} <= set(post["responses"])
    errors = (errors_of := post["responses"]["422"])["description"]
    assert InvalidJob.title in errors and KeyReused.title in errors and BadQuery.title in errors
    assert {"invalid-job", "idempotency-key-reused"} <= set(errors_of["content"][MEDIA]["examples"])
    assert "JobSpec" in schema["components"]["schemas"] and "Recommendation" in schema["components"]["schemas"]


def test_every_answer_has_a_model(api: TestClient) -> None:
    """The schema names a component for each JSON answer, and holds an example of a job."""
    schema = api.get("/openapi.json").json()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            (answer,) = [found for code, found in operation["responses"].items() if code.startswith("2")]
            if "application/json" in answer.get("content", {}):
                named = answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert schema["components"]["schemas"][named]["properties"], (method, path)


def test_the_client_reads_every_answer(api: TestClient, job: Make, queue: Queue, facts: Facts) -> None:
    """A client of the same version finds the same values in its models as are in the JSON."""
    with Client() as client:
        client._http = api  # type: ignore[assignment]
        job_id = client.submit(job(labels={"team": "a"}))
        queue.register("w", 1, facts())
        trial_id = run_trial(queue, 8.0, 1)
        running: tuple[tuple[str, Callable[[], BaseModel]], ...] = (
            (f"/v1/jobs/{job_id}/trials", lambda: TrialList(items=client.trials(job_id))),
            (f"/v1/jobs/{job_id}/events", lambda: EventList(items=client.events(job_id))),
            (f"/v1/trials/{trial_id}", lambda: client.trial(trial_id)),
            ("/v1/workers", lambda: WorkerList(items=client.workers())),
            ("/v1/levers", client.levers),
        )
        for path, read in running:
            assert read().model_dump(mode="json") == api.get(path).json(), path
        client.stop(job_id)
        ended: tuple[tuple[str, Callable[[], BaseModel]], ...] = (
            (f"/v1/jobs/{job_id}", lambda: client.job(job_id)),
            (f"/v1/jobs/{job_id}/memory-curve", lambda: client.memory_curve(job_id)),
            (f"/v1/jobs/{job_id}/waterfall", lambda: client.waterfall(job_id)),
            (f"/v1/jobs/{job_id}/pareto", lambda: client.pareto(job_id)),
            (f"/v1/jobs/{job_id}/recommendation", lambda: client.recommendation(job_id)),
        )
        for path, read in ended:
            assert read().model_dump(mode="json") == api.get(path).json(), path
        assert [one.id for one in client.jobs(label="team=a")] == [job_id]

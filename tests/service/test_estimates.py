"""Estimates on both databases: asked over REST, answered once by whichever worker holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from service import estimates
from service.conclude import MOST_DEATHS_OF_A_TASK
from service.contract.estimate import Estimate, MethodEstimate
from service.contract.hardware import HardwareFacts
from service.contract.measurement import MemoryLine
from service.contract.states import JobPhase, Origin, TaskState
from service.contract.task import EstimateClaim, PlanClaim, PlanDecision, TaskKind, TrialClaim, TrialRequest
from service.errors import LeaseLost, NotFound
from service.models import Job, Task
from service.queue import Queue
from service.requests import UNTAKEN_SECONDS
from tests.factory import configuration, measured, store_best

Make = Callable[..., dict[str, Any]]
LINE = MemoryLine(rest_bytes=1e9, slope_bytes=1e8)
SIZES: dict[str, Any] = dict.fromkeys(
    ("weights_gib", "gradients_gib", "optimizer_gib", "activations_gib", "temporary_gib", "overhead_gib"), 0.5
)
ANSWER = Estimate(
    memory_gib=24,
    max_length=512,
    device="cpu",
    methods={
        "lora": MethodEstimate(
            levers={}, parameters=9, trainable_parameters=1, line=LINE, largest_micro_batch=7, **SIZES
        )
    },
    seconds=1.0,
    statement="nothing was run",
)


def ask(api: TestClient, job: Make) -> str:
    answer = api.post("/v1/estimates", json={"spec": job(), "memory_gib": 24})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/estimates/{answer.json()['id']}"
    return str(answer.json()["id"])


def claimed(queue: Queue, worker: str = "w") -> EstimateClaim | None:
    claim = queue.claim(worker, (TaskKind.plan, TaskKind.estimate))
    assert claim is None or isinstance(claim, EstimateClaim)
    return claim


def begun(queue: Queue) -> TrialClaim:
    """The claimed first trial of the oldest job."""
    plan = queue.claim("w", (TaskKind.plan,))
    assert isinstance(plan, PlanClaim)
    queue.plan_input(plan)
    request = TrialRequest(configuration=configuration(), origin=Origin.baseline, number=1)
    queue.finish_plan(plan, PlanDecision(trials=(request,), phase=JobPhase.searching))
    trial = queue.claim("w", (TaskKind.trial,))
    assert isinstance(trial, TrialClaim)
    return trial


@pytest.fixture(autouse=True)
def _workers(queue: Queue, facts: Callable[..., HardwareFacts]) -> None:
    queue.register("w", 1, facts())
    queue.register("v", 2, facts(name="Other CPU"))


def expire(queue: Queue, claim: EstimateClaim) -> None:
    with Session(queue.engine) as session, session.begin():
        session.execute(update(Task).where(Task.id == claim.task_id).values(lease_until=1.0))


def test_asked_and_answered(api: TestClient, job: Make, queue: Queue) -> None:
    first, second = ask(api, job), ask(api, job)
    claim = claimed(queue)
    assert claim is not None and claim.task_id == first and claim.request.memory_gib == 24 and claim.known == ()
    assert api.get(f"/v1/estimates/{first}").json()["state"] == "running"
    queue.finish_estimate(claim, ANSWER)
    assert Estimate.model_validate(api.get(f"/v1/estimates/{first}").json()["result"]) == ANSWER
    other = claimed(queue)
    assert other is not None and other.task_id == second
    queue.fail(other, "model.source: it is no model", "log")
    found = api.get(f"/v1/estimates/{second}").json()
    assert (found["state"], found["error"]) == ("failed", "model.source: it is no model")
    assert claimed(queue) is None


def test_a_silent_worker_s_estimate_is_taken_over(api: TestClient, job: Make, queue: Queue) -> None:
    ask(api, job)
    lost = claimed(queue)
    assert lost is not None and claimed(queue, "v") is None
    assert queue.renew(lost, "estimating") is None and queue.reap() == 0
    expire(queue, lost)
    assert queue.reap() == 1
    again = claimed(queue, "v")
    assert again is not None and again.task_id == lost.task_id and again.attempt > lost.attempt
    with pytest.raises(LeaseLost):
        queue.finish_estimate(lost, ANSWER)
    queue.finish_estimate(again, ANSWER)


def test_an_estimate_that_ends_its_workers_is_given_up(api: TestClient, job: Make, queue: Queue) -> None:
    estimate_id = ask(api, job)
    for _ in range(MOST_DEATHS_OF_A_TASK):
        claim = claimed(queue)
        assert claim is not None
        expire(queue, claim)
        assert queue.reap() == 1
    assert claimed(queue) is None
    found = api.get(f"/v1/estimates/{estimate_id}").json()
    assert found["state"] == "failed" and "workers died" in found["error"]


def test_an_estimate_can_be_handed_back_or_cancelled(api: TestClient, job: Make, queue: Queue) -> None:
    estimate_id = ask(api, job)
    claim = claimed(queue)
    assert claim is not None
    queue.release(claim)
    again = claimed(queue)
    assert again is not None
    queue.cancel_estimate(estimate_id)
    with pytest.raises(LeaseLost):
        queue.renew(again)
    assert claimed(queue) is None and api.get(f"/v1/estimates/{estimate_id}").json()["state"] == "cancelled"
    with pytest.raises(NotFound):
        queue.cancel_estimate("none")


def test_a_job_s_tasks_come_before_estimates(api: TestClient, job: Make, queue: Queue) -> None:
    ask(api, job)
    api.post("/v1/jobs", json=job())
    first, second = (queue.claim("w", (TaskKind.plan, TaskKind.estimate)) for _ in range(2))
    assert first is not None and first.kind is TaskKind.plan
    assert second is not None and second.kind is TaskKind.estimate


def test_lines_of_the_same_model_on_the_same_hardware_go_with_it(
    api: TestClient, job: Make, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(line: MemoryLine, unread: int = 0) -> None:
        api.post("/v1/jobs", json=job())
        trial = begun(queue)
        queue.finish_trial(trial, measured(configuration(), memory_line=line, unread_bytes=unread), "")
        queue.cancel(trial.job_id)

    rows = 3 << 30  # of a large dataset, which another job of the model need not have
    more = {"rest_bytes": LINE.rest_bytes + rows, "update_bytes": LINE.update_bytes + rows}
    measure(LINE.model_copy(update=more), rows)
    monkeypatch.setattr(estimates, "MANY_KNOWN", 1)  # which trials of other models do not take
    measure(MemoryLine(rest_bytes=2e9, slope_bytes=2e8))
    with Session(queue.engine) as session, session.begin():
        newest = session.scalars(select(Job).order_by(Job.seq.desc()).limit(1)).one()
        newest.spec = newest.spec | {"model": newest.spec["model"] | {"source": "org/other"}}
    ask(api, job)
    claim = queue.claim("w", (TaskKind.estimate,))
    assert isinstance(claim, EstimateClaim)
    (one,) = claim.known
    assert one.line == LINE and one.method == "lora" and one.max_length == 512
    queue.finish_estimate(claim, ANSWER)
    ask(api, job)
    elsewhere = queue.claim("v", (TaskKind.estimate,))
    assert isinstance(elsewhere, EstimateClaim)
    assert elsewhere is not None and elsewhere.known == ()


def test_a_local_model_is_the_same_by_whichever_path(
    api: TestClient, job: Make, queue: Queue, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNOTUNE_DATA_ROOTS", str(root))
    api.post("/v1/jobs", json=job())
    trial = begun(queue)
    queue.finish_trial(trial, measured(configuration(), memory_line=LINE), "")
    queue.cancel(trial.job_id)
    ask(api, lambda: job(model={"source": str(root / "model"), "weights": "random"}))
    claim = queue.claim("w", (TaskKind.estimate,))
    assert isinstance(claim, EstimateClaim) and [one.line for one in claim.known] == [LINE]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"memory_gib": 0}, "memory_gib"),
        ({"memory_gib": 24, "spec": {"model": {"source": "./nowhere"}, "dataset": {"source": "x.jsonl"}}}, "nowhere"),
    ],
)
def test_mistakes(api: TestClient, job: Make, body: dict[str, Any], says: str) -> None:
    answer = api.post("/v1/estimates", json={"spec": job()} | body)
    assert answer.status_code == 422 and says in answer.text
    missing = api.get("/v1/estimates/none")
    assert missing.status_code == 404 and missing.json()["code"] == "not-found"


def test_the_memory_curve_of_the_best(api: TestClient, job: Make, queue: Queue, facts: Any) -> None:
    job_id = api.post("/v1/jobs", json=job()).json()["id"]
    assert api.get(f"/v1/jobs/{job_id}/memory-curve").status_code == 409
    trial = begun(queue)
    good = measured(configuration())
    assert good.timing is not None
    probes = [
        {"micro_batch_size": 8, "peak_bytes": 5, "reserved_bytes": 6},
        {"micro_batch_size": 9, "peak_bytes": None},
        {"micro_batch_size": 64, "peak_bytes": 7, "phase": "evaluation"},
    ]
    seen = good.model_validate(good.model_dump() | {"probes": probes, "curve": (good.timing,), "memory_line": LINE})
    queue.finish_trial(trial, seen, "")
    store_best(queue.engine, job_id, seen)
    curve = api.get(f"/v1/jobs/{job_id}/memory-curve").json()
    assert curve["line"]["slope_bytes"] == 1e8 and curve["largest_micro_batch"] == 16
    points = {(one["phase"], one["micro_batch_size"]): one for one in curve["points"]}
    assert points[("training", 8)]["tokens_per_second"] == pytest.approx(1280) and points[("training", 8)]["fits"]
    assert points[("training", 9)]["fits"] is False and ("evaluation", 64) in points


def test_an_estimate_that_nobody_waits_for_is_cancelled(api: TestClient, queue: Queue, job: Make) -> None:
    waiting, running = ask(api, job), ask(api, job)
    claim = claimed(queue)
    assert claim is not None
    assert {api.post(f"/v1/estimates/{one}/cancel").status_code for one in (waiting, running)} == {202}
    assert claimed(queue, "v") is None, "nobody begins it any more"
    with pytest.raises(LeaseLost):
        queue.renew(claim)
    assert api.get(f"/v1/estimates/{waiting}").json()["state"] == "cancelled"
    assert api.post("/v1/estimates/nonsense/cancel").status_code == 404


def test_an_estimate_that_is_answered_is_not_said_to_be_cancelled(api: TestClient, queue: Queue, job: Make) -> None:
    for state in ("done", "failed"):
        estimate_id, claim = ask(api, job), claimed(queue)
        assert claim is not None
        queue.finish_estimate(claim, ANSWER) if state == "done" else queue.fail(claim, "it is no model", "")
        assert api.post(f"/v1/estimates/{estimate_id}/cancel").json()["state"] == state


def test_an_estimate_that_no_worker_takes_is_forgotten_after_a_day(api: TestClient, queue: Queue, job: Make) -> None:
    forgotten, waiting, running = ask(api, job), ask(api, job), ask(api, job)
    submitted = api.post("/v1/jobs", json=job()).json()["id"]
    with Session(queue.engine) as session, session.begin():
        old = update(Task).where(Task.id != waiting)
        session.execute(old.values(created_at=Task.created_at - UNTAKEN_SECONDS - 1))
        session.execute(update(Task).where(Task.id == running).values(state=TaskState.running))
    queue.prune(None)
    found = [api.get(f"/v1/estimates/{one}").status_code for one in (forgotten, waiting, running)]
    assert found == [404, 200, 200]
    with Session(queue.engine) as session:
        assert session.scalars(select(Task).where(Task.job_id == submitted)).all(), "a job waits as long as it must"

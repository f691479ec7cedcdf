"""Estimates on both databases: asked over REST, answered once by whichever worker holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update
from sqlalchemy.orm import Session

from service.contract.estimate import Estimate, MethodEstimate
from service.contract.hardware import HardwareFacts
from service.contract.measurement import MemoryLine
from service.contract.task import PlanDecision, TaskKind, TrialRequest
from service.errors import LeaseLost
from service.models import EstimateRow
from service.queue import Queue
from tests.factory import configuration, measured, store_best

Make = Callable[..., dict[str, Any]]
LINE = MemoryLine(rest_bytes=1e9, slope_bytes=1e8)
SIZES: dict[str, float] = dict.fromkeys(
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


def test_asked_and_answered(api: TestClient, job: Make, queue: Queue) -> None:
    first, second = ask(api, job), ask(api, job)
    claim = queue.claim_estimate("w", "f")
    assert claim is not None and claim.id == first and claim.request.memory_gib == 24 and claim.known == ()
    assert api.get(f"/v1/estimates/{first}").json()["state"] == "running"
    queue.finish_estimate(claim, ANSWER)
    assert Estimate.model_validate(api.get(f"/v1/estimates/{first}").json()["result"]) == ANSWER
    other = queue.claim_estimate("w", "f")
    assert other is not None and other.id == second
    queue.finish_estimate(other, None, "model.source: it is no model")
    found = api.get(f"/v1/estimates/{second}").json()
    assert (found["state"], found["error"]) == ("failed", "model.source: it is no model")
    assert queue.claim_estimate("w", "f") is None


def test_a_silent_worker_s_estimate_is_taken_over(api: TestClient, job: Make, queue: Queue) -> None:
    ask(api, job)
    lost = queue.claim_estimate("w", "f")
    assert lost is not None and queue.claim_estimate("v", "f") is None
    with Session(queue.engine) as session, session.begin():
        session.execute(update(EstimateRow).values(lease_until=1.0))
    again = queue.claim_estimate("v", "f")
    assert again is not None and again.id == lost.id
    with pytest.raises(LeaseLost):
        queue.finish_estimate(lost, ANSWER)
    queue.finish_estimate(again, ANSWER)


def test_lines_of_the_same_model_on_the_same_hardware_go_with_it(
    api: TestClient, job: Make, queue: Queue, facts: Callable[..., HardwareFacts]
) -> None:
    queue.register("w", 1, facts())
    api.post("/v1/jobs", json=job())
    plan = queue.claim("w", (TaskKind.plan,))
    assert plan is not None
    queue.plan_input(plan)
    request = TrialRequest(configuration=configuration(), origin="baseline", number=1)
    queue.finish_plan(plan, PlanDecision(trials=(request,), phase="searching"))
    trial = queue.claim("w", (TaskKind.trial,))
    assert trial is not None
    queue.finish_trial(trial, measured(configuration(), memory_line=LINE), "")
    ask(api, job)
    claim = queue.claim_estimate("w", facts().fingerprint)
    assert claim is not None
    (one,) = claim.known
    assert one.line == LINE and one.method == "lora" and one.max_length == 512
    queue.finish_estimate(claim, ANSWER)
    ask(api, job)
    elsewhere = queue.claim_estimate("w", "another")
    assert elsewhere is not None and elsewhere.known == ()


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
    queue.register("w", 1, facts())
    job_id = api.post("/v1/jobs", json=job()).json()["id"]
    assert api.get(f"/v1/jobs/{job_id}/memory-curve").status_code == 409
    plan = queue.claim("w", (TaskKind.plan,))
    assert plan is not None
    queue.plan_input(plan)
    request = TrialRequest(configuration=configuration(), origin="baseline", number=1)
    queue.finish_plan(plan, PlanDecision(trials=(request,), phase="searching"))
    trial = queue.claim("w", (TaskKind.trial,))
    assert trial is not None
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

"""Objectives and their units: memory and cost in the answer, in the table and in the job; idle time in the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError
from rich.console import Console
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from service import history, jobs
from service.aims import instead
from service.cli import verify
from service.cli.result import result_table, whole_run
from service.comparisons import waterfall
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Soak, Verification
from service.contract.objective import counted_seconds, evaluations, run_seconds, training_seconds
from service.contract.recommendation import ObjectiveFigure, Recommendation
from service.contract.states import JobPhase, JobStatus, Origin
from service.contract.task import (
    PlanClaim,
    PlanDecision,
    TaskKind,
    TrialClaim,
    TrialRecord,
    TrialRequest,
    VerifyRequest,
)
from service.models import JOBS, TASKS, Job
from service.queue import Queue
from service.recommend import recommend
from tests.factory import block, configuration, measured, record
from tests.factory import history as trials
from worker.plan.verdicts import judge

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]
GIB = 1 << 30
BASE = measured(configuration(micro=8), 10.0, peak_bytes=8 * GIB)
FAST = measured(configuration(batching="grouped"), 5.0, peak_bytes=6 * GIB)
SLIM = measured(configuration(checkpointing="full"), 9.0, peak_bytes=4 * GIB)
SLOW = measured(configuration(checkpointing="offloaded"), 12.0, peak_bytes=2 * GIB)
RECORDS = (record(BASE, Origin.baseline), *map(record, (FAST, SLIM, SLOW)))


def for_memory(spec: Spec, **search: Any) -> JobSpec:
    return spec(search={"objective": "memory", "verify": "quick"} | search)


def shown(best: Recommendation) -> str:
    console = Console(width=200)
    with console.capture() as said:
        console.print(result_table(best))
    return said.get()


def test_cost_needs_a_price(api: TestClient, job: Callable[..., dict[str, Any]], spec: Spec) -> None:
    refused = api.post("/v1/jobs", json=job(search={"objective": "cost"}))
    assert refused.status_code == 422
    assert "search.objective: cost needs a price; set hardware.price_per_hour" in refused.json()["detail"]
    assert (
        api.post("/v1/jobs", json=job(search={"objective": "cost"}, hardware={"price_per_hour": 2})).status_code < 300
    )
    with pytest.raises(ValidationError, match="set hardware.price_per_hour to what an hour"):
        spec(search={"objective": "cost"})


def test_cost_orders_as_time_does_and_is_shown_as_money(spec: Spec, facts: Facts) -> None:
    job = spec(search={"objective": "cost", "verify": "quick"}, hardware={"price_per_hour": 7.2})
    best = recommend("j", job, facts(), trials(job, 5.0, 4.0), {})
    usual = recommend("j", spec(), facts(), trials(spec(), 5.0, 4.0), {})
    assert best and usual and best.configuration == usual.configuration
    evidence = best.evidence
    figure = evidence.objective
    assert figure and (figure.name, figure.unit) == ("cost", "money")
    assert figure.value == pytest.approx(evidence.run_seconds / 500)
    assert figure.baseline == pytest.approx((evidence.baseline_run_seconds or 0) / 500)
    assert best.notes[0] == "Objective cost: the whole run would cost 0.38 at 7.2 an hour, and 0.94 with the baseline."
    assert "cost" not in whole_run(evidence), "it is said already"
    table = shown(best)
    assert "run costs" in table and "0.38" in table and "0.94" in table and "0.47" in table
    assert "run costs" not in shown(usual)


def test_a_step_that_the_epochs_end_in_is_trained_in_full(spec: Spec) -> None:
    """As train.py does: of less than one step, one."""
    one = measured(configuration())
    assert one.dataset is not None
    steps = -(-one.dataset.rows // one.configuration.effective_batch_size)
    whole = training_seconds(spec(training={"epochs": 1.0}), one)
    assert training_seconds(spec(training={"epochs": 2.0}), one) == pytest.approx(2 * whole)
    assert training_seconds(spec(training={"epochs": 1e-4}), one) == pytest.approx(whole / steps)
    assert training_seconds(spec(training={"epochs": 1.0 + 1e-4}), one) == pytest.approx(whole * (steps + 1) / steps)


@pytest.mark.parametrize(("objective", "unit"), [("wall-clock", "seconds"), ("throughput", "tokens/s")])
def test_time_is_shown_in_its_unit(spec: Spec, facts: Facts, objective: str, unit: str) -> None:
    job = spec(search={"objective": objective, "verify": "quick"})
    best = recommend("j", job, facts(), trials(job, 5.0), {})
    assert best and best.evidence.objective and best.evidence.objective.unit == unit
    figure, evidence = best.evidence.objective, best.evidence
    assert figure.value == (evidence.run_seconds if unit == "seconds" else evidence.tokens_per_second)
    assert figure.baseline == pytest.approx(evidence.baseline_run_seconds if unit == "seconds" else 1280.0)
    assert not any(note.startswith("Objective") for note in best.notes)


def test_memory_takes_the_least_peak_that_is_not_slower(spec: Spec, facts: Facts) -> None:
    best = recommend("j", for_memory(spec), facts(), RECORDS, {})
    assert best and best.evidence.measurement == SLIM
    assert best.evidence.objective == ObjectiveFigure(name="memory", unit="bytes", value=4 * GIB, baseline=8 * GIB)
    said = "Objective memory: it takes 4.00 GiB at most, 8.00 GiB with the baseline; the least of what is not slower "
    assert best.notes[0] == said + "than the baseline."
    assert best.evidence.speedup and best.evidence.speedup > 1.05, "the speed-up is one of time"
    assert best.alternatives == (FAST, BASE, SLOW)
    alone = recommend("j", for_memory(spec), facts(), RECORDS[1:], {})
    assert alone and alone.evidence.measurement == SLOW and "nothing says how slow" in alone.notes[0]


@pytest.mark.parametrize(("seconds", "peak"), [(12.0, 2 * GIB), (9.0, None)], ids=["slower", "unknown"])
def test_of_methods_the_one_that_takes_least_leads_if_it_is_not_slower_and_its_peak_is_known(
    spec: Spec, facts: Facts, seconds: float, peak: int | None
) -> None:
    job = for_memory(spec, fixed={"checkpointing": "full"}).model_copy(update={"method": ("lora", "qlora")})
    lora = measured(configuration(checkpointing="full"), seconds, peak_bytes=peak)
    other = measured(configuration("qlora", micro=8), 10.0, peak_bytes=8 * GIB)
    qlora = measured(configuration("qlora", checkpointing="full"), 9.5, peak_bytes=4 * GIB)
    baselines = (record(BASE, Origin.baseline), record(other, Origin.baseline))
    best = recommend("j", job, facts(), (*baselines, record(lora), record(qlora)), {})
    assert best and set(best.methods) == {"lora", "qlora"} and best.evidence.measurement == qlora


def verified(job: JobSpec, slim: float, soak: Soak | None = None) -> dict[str, Verification | None]:
    request = VerifyRequest(method="lora", baseline=BASE, finalists=(SLIM, FAST), blocks=1, seconds_limit=60)
    blocks = (block(BASE, 10.0), block(SLIM, slim), block(FAST, 5.0))
    soaks: dict[str, Soak | str] = {FAST.configuration.key: Soak(steps=8, wanted_steps=8)}
    soaks |= {SLIM.configuration.key: soak} if soak else {}
    return {"lora": judge(job, request, blocks, soaks, {})}


def test_an_unverified_trial_is_not_said_to_be_faster_than_the_verified_winner(spec: Spec, facts: Facts) -> None:
    """The baseline's trial took 10 s on a busy machine, its block 6: the winner is 1.2x, and what is slower, less."""
    job = spec(search={"verify": "quick"})
    request = VerifyRequest(method="lora", baseline=BASE, finalists=(FAST,), blocks=1, seconds_limit=60)
    soaks: dict[str, Soak | str] = {FAST.configuration.key: Soak(steps=8, wanted_steps=8)}
    held: dict[str, Verification | None] = {}
    held["lora"] = judge(job, request, (block(BASE, 6.0), block(FAST, 5.0)), soaks, {})
    between = measured(configuration(precision="bf16-mixed"), 5.5)
    best = recommend("j", job, facts(), (*RECORDS[:2], record(between)), held)
    assert best and best.evidence.measurement == FAST and best.evidence.speedup == pytest.approx(1.2, rel=0.01)
    (line,) = (line for line in shown(best).splitlines() if "bf16-mixed" in line)
    assert "1.09x" in line and "not verified" in line


def test_a_unit_with_more_tokens_a_row_than_the_data_is_told_by_its_tokens(spec: Spec) -> None:
    """Where ten of 10,000 rows are 400 times as long as the others, a quick unit may hold one of them."""
    made = measured(configuration(), 10.0)
    assert made.timing and made.dataset
    heavy = made.model_copy(update={"timing": made.timing.model_copy(update={"tokens": made.timing.tokens * 1.5})})
    assert run_seconds(spec(), made) - made.once_seconds == pytest.approx(3 * 200_000 / 12_800 * 10)
    assert run_seconds(spec(), heavy) - made.once_seconds == pytest.approx(3 * 200_000 / 19_200 * 10)


def test_settings_that_diverge_are_told(spec: Spec, facts: Facts) -> None:
    """Speeds hold, but what the user asked for learns nothing, with the baseline as well."""
    job = spec(search={"verify": "quick"})
    request = VerifyRequest(method="lora", baseline=BASE, finalists=(FAST,), blocks=1, seconds_limit=60)
    for last, lowest, told in (
        (37.0, 12.0, "before the first step, and was 37"),
        (8.0, 2.0, "come down to 2, and was 8"),
        (2.9, 2.0, "come down to 2"),
        (0.7, 0.05, "come down to 0.05"),
        (2.4, 2.0, None),
        (0.4, 0.01, None),
        (8.0, None, None),
    ):
        soak = Soak(steps=8, wanted_steps=8, last_loss=last, lowest_loss=lowest)
        held: dict[str, Verification | None] = {}
        held["lora"] = judge(job, request, (block(BASE, 6.0), block(FAST, 5.0)), {FAST.configuration.key: soak}, {})
        best = recommend("j", job, facts(), RECORDS[:2], held)
        assert best
        notes = [note for note in best.notes if note.startswith("Training diverges")]
        assert told in notes[0] if told else notes == [], (last, lowest, notes)


def test_what_blocks_find_slower_is_rejected_as_that(spec: Spec, facts: Facts) -> None:
    job = for_memory(spec)
    best = recommend("j", job, facts(), RECORDS, verified(job, 11.0))
    assert best and best.evidence.measurement == FAST and best.stability.stable is True
    (rejected,) = best.rejected
    assert rejected.outcome == "slower" and rejected.levers == SLIM.configuration.levers
    assert rejected.reason == "it runs at 0.91 of the baseline's speed, which objective memory rules out"


def test_where_nothing_is_better_the_baseline_is_said_to_be_the_answer(spec: Spec, facts: Facts) -> None:
    best = recommend("j", for_memory(spec), facts(), (RECORDS[0], RECORDS[3]), {})
    assert best and best.evidence.measurement == BASE
    assert best.notes[0].endswith("nothing that takes less was as fast as this, which is the baseline.")


def test_where_only_slower_ones_may_be_recommended_it_is_said(spec: Spec, facts: Facts) -> None:
    best = recommend("j", for_memory(spec, fixed={"checkpointing": "offloaded"}), facts(), RECORDS, {})
    assert best and best.evidence.measurement == SLOW
    assert best.notes[0].endswith(
        "nothing that search.fixed allows is as fast as the baseline, so this is the fastest."
    )


def test_the_soaks_peak_is_what_is_promised(spec: Spec, facts: Facts) -> None:
    job = for_memory(spec)
    soak = Soak(micro_batch_size=8, steps=8, wanted_steps=8, peak_bytes=5 * GIB)
    best = recommend("j", job, facts(), RECORDS, verified(job, 9.0, soak))
    assert best and best.evidence.measurement == SLIM and best.evidence.peak_bytes == 5 * GIB
    assert best.evidence.objective and best.evidence.objective.value == 5 * GIB
    usual = recommend("j", spec(), facts(), RECORDS, verified(spec(), 4.0, soak))
    assert usual and usual.evidence.measurement == SLIM and usual.evidence.peak_bytes == 5 * GIB


def test_the_method_of_least_memory_leads_if_it_is_not_slower_than_its_own_baseline(spec: Spec, facts: Facts) -> None:
    job = spec(method=["lora", "full"], search={"objective": "memory", "verify": "quick"})
    full = measured(configuration("full", micro=8), 20.0, peak_bytes=9 * GIB)
    small = measured(configuration("full", checkpointing="full"), 19.0, peak_bytes=3 * GIB)
    both = (*RECORDS, record(full, Origin.baseline), record(small))
    best = recommend("j", job, facts(), both, {})
    assert best and best.evidence.measurement == small, "it is slower than lora's baseline, which is another method's"


def test_other_aims_of_a_search_for_memory(spec: Spec) -> None:
    rounding = SLIM.model_copy(update={"configuration": configuration(checkpointing="full", compile="per-layer")})
    found = {
        one.aim: one for one in instead(for_memory(spec), rounding, [BASE, FAST, SLIM, SLOW, rounding], {"lora": BASE})
    }
    assert found["no-compile"].peak_bytes == 4 * GIB and "the one with the least memory" in found["no-compile"].meaning
    assert found["fastest"].peak_bytes == 6 * GIB and found["fastest"].speed == pytest.approx(9 / 5, abs=0.01)
    assert "least-memory" not in found


def test_levers_bring_memory(spec: Spec) -> None:
    best = measured(configuration(checkpointing="full", batching="grouped"), 9.0, peak_bytes=4 * GIB)
    found = waterfall(for_memory(spec), best, BASE, [record(one) for one in (BASE, best, FAST)])
    by_lever = {one.lever: one for one in found.contributions}
    assert found.speedup == 2.0, "its peak over the best's"
    without = by_lever["checkpointing"]
    assert (without.factor, without.low, without.high) == (1.5, 1.5, 1.5), "6 GiB instead of 4"
    unknown = waterfall(
        for_memory(spec),
        best,
        BASE,
        [record(one) for one in (BASE, best, FAST.model_copy(update={"peak_bytes": None}))],
    )
    assert "does not tell" in {one.lever: one.reason for one in unknown.contributions}["checkpointing"]


def test_the_list_marks_the_least_memory(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    with_trials(queue, facts, for_memory(spec))
    with Session(engine) as session:
        (job,) = session.scalars(select(Job))
        listed = jobs.trials(session, job)
        view = jobs.view(session, job, 0.0)
    assert [one.fastest for one in listed] == [False, False, True, False]
    assert view.best and view.best.objective and view.best.objective.value == 4 * GIB


def test_the_list_marks_what_is_recommended(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    """Of a configuration that was measured again, what others disturbed least counts, however fast the other was."""
    again, other = configuration(batching="grouped"), configuration(batching="sorted")
    disturbed, calm = (
        one.model_copy(update={"timing": one.timing and one.timing.model_copy(update={"clean_share": share})})
        for one, share in ((measured(again, 5.0), 0.1), (measured(again, 9.0), 1.0))
    )
    with_trials(
        queue, facts, spec(), (RECORDS[0], record(disturbed), record(calm, Origin.repeat), record(measured(other, 7.0)))
    )
    with Session(engine) as session:
        (job,) = session.scalars(select(Job))
        listed, best = jobs.trials(session, job), jobs.recommendation(job)
    marked = [one.configuration.levers for one in listed if one.fastest]
    assert marked == [other.levers] and best.configuration.levers == other.levers


def with_trials(queue: Queue, facts: Facts, job: JobSpec, records: tuple[TrialRecord, ...] = RECORDS) -> str:
    """A job that has run the trials."""
    queue.register("w", 1, facts())
    job_id = queue.submit(job)
    plan = queue.claim("w", (TaskKind.plan,))
    assert isinstance(plan, PlanClaim)
    queue.plan_input(plan)
    run_trials(queue, plan, records)
    return job_id


def run_trials(queue: Queue, plan: PlanClaim, records: tuple[TrialRecord, ...] = RECORDS) -> None:
    asked = tuple(
        TrialRequest(configuration=one.measurement.configuration, origin=one.request.origin, number=number)
        for number, one in enumerate(records, start=1)
    )
    queue.finish_plan(plan, PlanDecision(trials=asked, phase=JobPhase.searching))
    for one in records:
        trial = queue.claim("w", (TaskKind.trial,))
        assert isinstance(trial, TrialClaim)
        queue.finish_trial(trial, one.measurement.model_copy(update={"parameters": 7}), "")


def test_a_search_for_memory_neither_teaches_nor_learns(queue: Queue, facts: Facts, spec: Spec) -> None:
    """Its paces are those of small micro batches."""
    with_trials(queue, facts, for_memory(spec))
    ended(queue)
    for job, told in ((spec(name="fast"), 0), (spec(name="again"), 3), (for_memory(spec), 0)):
        queue.submit(job)
        plan = queue.claim("w", (TaskKind.plan,))
        assert isinstance(plan, PlanClaim)
        assert len(queue.plan_input(plan).earlier) == told, job.name
        if job.name == "fast":
            run_trials(queue, plan)
            ended(queue)
        else:
            queue.finish_plan(plan, PlanDecision(finish=True, error="over", phase=JobPhase.done))


def ended(queue: Queue) -> None:
    plan = queue.claim("w", (TaskKind.plan,))
    assert isinstance(plan, PlanClaim)
    queue.plan_input(plan)
    queue.finish_plan(plan, PlanDecision(finish=True, phase=JobPhase.done))


def test_idle_is_the_time_in_which_no_task_ran(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    """Trials on two workers, from 3 to 10, 5 to 12, 20 to 21, and one since 30; plans from 0 to 1 and from 14 to 15."""
    job_id = with_trials(queue, facts, spec())
    spans = iter([(3.0, 10.0), (5.0, 12.0), (20.0, 21.0), (30.0, None)])
    with Session(engine) as session, session.begin():
        session.execute(update(JOBS).values(started_at=0.0))
        session.execute(update(TASKS).where(TASKS.c.kind == TaskKind.plan).values(started_at=0.0, finished_at=1.0))
        of_job = session.execute(select(TASKS.c.id).where(TASKS.c.kind == TaskKind.trial).order_by(TASKS.c.number))
        for (task,), (start, stop) in zip(of_job.all(), spans, strict=True):
            state = "done" if stop else "running"
            change = update(TASKS).where(TASKS.c.id == task)
            session.execute(change.values(started_at=start, finished_at=stop, state=state))
    queued = queue.claim("w", (TaskKind.plan,))
    assert isinstance(queued, PlanClaim)
    with Session(engine) as session, session.begin():
        change = update(TASKS).where(TASKS.c.id == queued.task_id)
        session.execute(change.values(started_at=14.0, finished_at=15.0, state="done"))
    with Session(engine) as session:
        spent = history.time_of_tasks(session, job_id)
    # Idle from 1 to 3, from 12 to 14, from 15 to 20, and from 21 to 30.
    assert spent == {"trials": 7.0 + 7.0 + 1.0, "planning": 2.0, "idle": 2.0 + 2.0 + 5.0 + 9.0}


def test_the_answer_says_how_long_the_job_was_idle(queue: Queue, engine: Engine, facts: Facts, spec: Spec) -> None:
    job_id = with_trials(queue, facts, spec())
    with Session(engine) as session, session.begin():
        session.execute(update(JOBS).values(started_at=JOBS.c.started_at - 100.0))
    ended(queue)
    with Session(engine) as session:
        job = jobs.get(session, job_id)
        best = jobs.recommendation(job)
    assert job.status == JobStatus.succeeded and 99.0 < best.time_spent["idle"] < 130.0
    assert best.time_spent.keys() >= {"timing", "planning"}


def test_more_memory_than_promised_does_not_hold(spec: Spec, facts: Facts) -> None:
    old = recommend("j", for_memory(spec), facts(), RECORDS, {})
    grown = SLIM.model_copy(update={"peak_bytes": 5 * GIB})
    new = recommend("j", for_memory(spec), facts(), (RECORDS[0], record(grown)), {})
    assert old and new and verify.compare(old, old).holds
    found = verify.compare(old, new)
    assert not found.holds and found.reasons == ("The peak of its memory is +25% away.",)
    assert "peak GiB: 4.00 then, 5.00 now" in found.lines()


def test_evaluations_are_part_of_the_run(spec: Spec, facts: Facts) -> None:
    """1,000 rows in steps of 32, three epochs: 96 steps, so that every 10 steps and at the end are 10 evaluations."""
    job = spec(training={"effective_batch_size": 32, "epochs": 3, "evaluation_steps": 10}, search={"verify": "quick"})
    made = configuration(effective=32)
    plain = measured(made, 10.0)
    once = run_seconds(job, plain)
    assert run_seconds(job, plain.model_copy(update={"evaluation_seconds": 7.0})) == pytest.approx(once + 70)
    only_last = spec(training={"effective_batch_size": 32, "epochs": 3})
    assert evaluations(only_last, 1000, 32) == 1 and evaluations(job, 1000, 32) == 10
    assert evaluations(job, 960, 32) == 9, "the one after the last step is the one at the end"
    throughput = spec(training=job.training.model_dump(), search={"objective": "throughput"})
    slow = plain.model_copy(update={"evaluation_seconds": 7.0})
    assert counted_seconds(throughput, slow) == counted_seconds(throughput, plain)

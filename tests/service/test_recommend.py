"""The recommendation: what is chosen, what is said, and that its arguments are real."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console

from service.cli.result import show_result, whole_run
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement, Outcome, Probe, Soak, Verification
from service.contract.recommendation import Recommendation
from service.contract.replay import Proof
from service.contract.states import Origin, ProbePhase
from service.contract.task import PlanInput, TrialRecord, VerifyRequest
from service.exports import EXPORTS
from service.recommend import recommend
from tests.factory import DATASET, block, configuration, failed, history, measured, record
from worker.plan.verdicts import judge
from worker.plan.view import View

SOAK = Soak(steps=8, wanted_steps=8)
Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


def test_best_so_far_from_the_first_good_trial_on(spec: Spec, facts: Facts) -> None:
    assert recommend("j", spec(), facts(), (), {}) is None
    only = recommend("j", spec(), facts(), history(spec()), {}, final=False)
    assert only and only.final is False and only.evidence.speedup == 1.0
    best = recommend("j", spec(), facts(), history(spec(), 5.0, 4.0), {}, final=False)
    assert best and best.configuration.levers["batching"] == "grouped"
    assert best.evidence.speedup == pytest.approx(2.5, rel=0.01) and best.stability.stable is None
    assert best.evidence.speedup_low and best.evidence.speedup_low < 2.5 < (best.evidence.speedup_high or 0)


def test_what_the_time_went_into_is_said(spec: Spec, facts: Facts) -> None:
    records = history(spec(), 5.0)
    base, one = (record.measurement for record in records)
    request = VerifyRequest(method="lora", baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
    judged = judge(spec(), request, (block(base, 10.0), block(one, 5.0)), {}, {})
    verified: dict[str, Verification | None] = {"lora": judged.model_copy(update={"seconds": 40.0})}
    best = recommend("j", spec(), facts(), records, verified)
    assert best and best.time_spent == {"timing": 2 * (10.0 + 5.0), "verification": 40.0}
    best = recommend("j", spec(), facts(), records, verified, spent={"trials": 36.0, "planning": 1.0, "idle": 2.0})
    others = {"processes": 6.0, "planning": 1.0, "idle": 2.0}
    assert best and best.time_spent == {"timing": 30.0, "verification": 40.0} | others


def test_the_whole_run_has_its_time_and_its_price(spec: Spec, facts: Facts) -> None:
    priced = spec(hardware={"price_per_hour": 7.2})
    best = recommend("j", priced, facts(), history(priced, 5.0), {})
    assert best and best.evidence.speedup and best.evidence.run_cost == pytest.approx(best.evidence.run_seconds / 500)
    assert best.evidence.baseline_run_seconds == pytest.approx(best.evidence.run_seconds * best.evidence.speedup)
    said = whole_run(best.evidence)
    assert "with the baseline; it would cost" in said and " instead of " in said
    free = recommend("j", spec(), facts(), history(spec(), 5.0), {})
    assert free and free.evidence.run_cost is None and "cost" not in whole_run(free.evidence)


def test_verification_decides(spec: Spec, facts: Facts) -> None:
    records = history(spec(), 5.0, 4.0)
    base, one, two = (record.measurement for record in records)
    request = VerifyRequest(method="lora", baseline=base, finalists=(two, one), blocks=1, seconds_limit=60)
    blocks = (block(base, 12.0), block(one, 5.0), block(two, 4.0))
    proofs: dict[str, Proof | str] = {two.configuration.key: Proof(reasons=("half of the labels",))}
    soaks: dict[str, Soak | str] = {one.configuration.key: SOAK}
    best = recommend("j", spec(), facts(), records, {"lora": judge(spec(), request, blocks, soaks, proofs)})
    assert best and best.configuration.levers["batching"] == "sorted" and best.stability.stable is True
    assert best.evidence.speedup == pytest.approx(12.0 / 5.0, rel=0.01) and "verification" in best.evidence.speedup_from
    assert any(rejected.outcome == "unstable" for rejected in best.rejected)
    assert [alternative.configuration for alternative in best.alternatives] == [base.configuration], "only rejected"
    unsoaked = recommend("j", spec(), facts(), records, {"lora": judge(spec(), request, blocks, {}, proofs)})
    assert unsoaked and unsoaked.stability.stable is None and "it was not soaked" in unsoaked.stability.statement


def test_methods_that_were_verified_minutes_apart_are_in_doubt_where_they_are_close(spec: Spec, facts: Facts) -> None:
    job = spec(method=["lora", "qlora"])

    def of(method: Method, seconds: float) -> tuple[tuple[TrialRecord, ...], Verification]:
        base = measured(configuration(method), 10.0)
        one = measured(configuration(method, batching="sorted"), seconds)
        request = VerifyRequest(method=method, baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
        judged = judge(job, request, (block(base, 10.0), block(one, seconds)), {one.configuration.key: SOAK}, {})
        return (record(base, Origin.baseline), record(one)), judged

    def notes(qlora: float) -> str:
        (ones, first), (others, second) = of("lora", 5.0), of("qlora", qlora)
        best = recommend("j", job, facts(), (*ones, *others), {"lora": first, "qlora": second})
        assert best and best.configuration.method == "lora"
        return " ".join(best.notes)

    assert "With qlora it takes 1.10 times as long as with lora" in notes(5.5)
    assert "their order is not sure" in notes(5.5) and "their order" not in notes(7.0)


def test_the_note_on_the_batch_that_was_chosen_says_no_more_than_holds(spec: Spec, facts: Facts) -> None:
    def note(job: JobSpec, *trials: Measurement) -> str:
        records = (record(trials[0], Origin.baseline), *map(record, trials[1:]))
        best = recommend("j", job, facts(), records, {})
        assert best
        return next(one for one in best.notes if one.startswith("No effective batch was given"))

    base, fast = measured(configuration(), 10.0), measured(configuration(effective=64, batching="sorted"), 5.0)
    free = {"learning_rate": 1e-4}
    chosen = note(spec(training=free), base, fast)
    assert "the search chose 64, the smallest within 1% of the fastest; the learning rate went from" in chosen
    slim = measured(configuration(batching="grouped"), 9.9, peak_bytes=1 << 20)
    assert "within 1%" not in note(spec(training=free, search={"objective": "memory"}), base, fast, slim)


@pytest.mark.parametrize(("first", "second", "verified"), [(0.4, 0.1, 8), (0.1, 0.4, 2), (None, None, 2)])
def test_of_a_repeated_trial_the_one_that_was_verified_is_recommended(
    spec: Spec, facts: Facts, first: float | None, second: float | None, verified: int
) -> None:
    """The less disturbed: its micro batch was soaked, and the other one's may be larger."""
    job, chosen = spec(), configuration(batching="sorted")

    def tried(micro: int, clean: float | None) -> Measurement:
        made = measured(chosen, 5.0, micro_batch_size=micro, gradient_accumulation_steps=32 // micro)
        assert made.timing is not None
        return made.model_copy(update={"timing": made.timing.model_copy(update={"clean_share": clean})})

    records = (history(job)[0], record(tried(8, first)), record(tried(2, second), Origin.repeat))
    best = recommend("j", job, facts(), records, {})
    view = View(PlanInput(spec=job, facts=facts(), history=records, next_number=4), "lora")
    assert best and best.configuration.micro_batch_size == verified == view.good[0].micro_batch_size
    assert verified * best.configuration.gradient_accumulation_steps == 32


def test_what_is_fixed_holds_where_the_baseline_is_the_fastest(spec: Spec, facts: Facts) -> None:
    job = spec(search={"fixed": {"batching": "sorted"}, "verify": "quick"})
    records = history(job, 12.0)
    base, one = (record.measurement for record in records)
    best = recommend("j", job, facts(), records, {})
    assert best and best.configuration.levers["batching"] == "sorted"
    request = VerifyRequest(method="lora", baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
    judged = judge(job, request, (block(base, 10.0), block(one, 12.0)), {one.configuration.key: SOAK}, {})
    assert judged.ranking == (one.configuration.key,), "so that it is what the soak runs"
    best = recommend("j", job, facts(), records, {"lora": judged})
    assert best and best.configuration.levers["batching"] == "sorted" and best.stability.stable is True
    assert best.evidence.speedup == pytest.approx(10.0 / 12.0, rel=0.01)
    assert recommend("j", job, facts(), records[:1], {}) is None


def test_what_was_compared_with_nothing_is_not_called_stable(spec: Spec, facts: Facts) -> None:
    one = measured(configuration(batching="sorted"), 5.0)
    records = (record(failed(configuration(micro=8)), Origin.baseline), record(one))
    request = VerifyRequest(method="lora", baseline=None, finalists=(one,), blocks=1, seconds_limit=60)
    judged = judge(spec(), request, (block(one, 5.0),), {one.configuration.key: SOAK}, {})
    best = recommend("j", spec(), facts(), records, {"lora": judged})
    assert best and best.stability.stable is None and best.evidence.speedup is None
    assert "the baseline did not run to its end" in best.evidence.speedup_from
    assert "it was compared with nothing, as no baseline ran to its end" in best.stability.statement
    assert "a soak of 8 of 8 steps" in best.stability.statement
    console = Console(width=200)
    with console.capture() as shown:
        show_result(console, best)
    told = shown.get()
    assert "not compared" in told and best.stability.statement in told and whole_run(best.evidence) in told
    judged = judge(spec(), request, (block(one, 5.0),), {}, {one.configuration.key: Proof()})
    proved = recommend("j", spec(), facts(), records, {"lora": judged})
    assert proved and proved.stability.stable is True, "a reference it was compared with"


@pytest.mark.parametrize(
    ("soaked", "probed", "peak"), [(3 << 29, 1 << 30, 3 << 29), (None, 1 << 30, 1 << 30), (None, None, None)]
)
def test_the_peak_is_that_of_the_micro_batch_that_the_soak_lowered(
    spec: Spec, facts: Facts, soaked: int | None, probed: int | None, peak: int | None
) -> None:
    """The trial's micro batch of 8 took 2 GiB and did not hold; what is recommended takes less."""
    probes = (
        Probe(micro_batch_size=8, peak_bytes=2 << 30),
        Probe(micro_batch_size=4, peak_bytes=probed),
        Probe(micro_batch_size=4, peak_bytes=5 << 30, phase=ProbePhase.evaluation),  # says nothing of training
    )
    records = (history(spec())[0], record(measured(configuration(batching="sorted"), 5.0, probes=probes)))
    base, one = (record.measurement for record in records)
    slim = record(measured(configuration(batching="grouped"), 9.0, peak_bytes=7 << 28))  # 1.75 GiB
    request = VerifyRequest(method="lora", baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
    soak = Soak(micro_batch_size=4, steps=8, wanted_steps=8, worst_case_steps=2, peak_bytes=soaked, saved_bytes=0)
    judged = judge(spec(), request, (block(base, 12.0), block(one, 5.0)), {one.configuration.key: soak}, {})
    best = recommend("j", spec(), facts(), (*records, slim), {"lora": judged})
    assert best and best.configuration.micro_batch_size == 4 and best.evidence.measurement.peak_bytes == 2 << 30
    assert not [other for other in best.instead if other.aim == "least-memory"], "the answer itself takes less"
    assert ", an evaluation (no save: the disk" in best.stability.statement
    assert best.evidence.peak_bytes == peak
    assert best.evidence.headroom_bytes == (None if peak is None else (3 << 30) - peak)


def test_what_the_soak_lowered_is_what_is_run(spec: Spec, facts: Facts) -> None:
    """A step of 32 samples takes eleven micro batches of 3, and their tokens and the evaluation are as was soaked."""
    dataset = DATASET.model_copy(update={"longest": 700})
    budgeted = measured(configuration(batching="token-budget"), 5.0, dataset=dataset)
    records = (history(spec())[0], record(budgeted))
    base, one = (record.measurement for record in records)
    request = VerifyRequest(method="lora", baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
    soak = Soak(micro_batch_size=3, steps=8, wanted_steps=8, evaluation_batch_size=6, peak_bytes=1 << 30)
    judged = judge(spec(), request, (block(base, 12.0), block(one, 5.0)), {one.configuration.key: soak}, {})
    best = recommend("j", spec(), facts(), records, {"lora": judged})
    assert best and best.configuration.levers["batching"] == "token-budget"
    run = best.configuration
    assert (run.micro_batch_size, run.gradient_accumulation_steps, run.evaluation_batch_size) == (3, 11, 6)
    assert run.token_budget == 3 * 700
    unsoaked = recommend("j", spec(), facts(), records, {})
    assert unsoaked and unsoaked.configuration.evaluation_batch_size == 16, "as the trial found it to fit"
    assert unsoaked.configuration.token_budget == 8 * 700
    padded = recommend("j", spec(), facts(), records[:1], {})
    assert padded and padded.configuration.token_budget is None


def test_what_the_adapter_leaves_out_and_saves_is_as_it_was_measured(spec: Spec, facts: Facts) -> None:
    kept = {"adapter_excludes": ("router",), "adapter_saves": ("score",)}
    best = recommend("j", spec(), facts(), (record(measured(configuration(), 5.0, **kept)),), {})
    assert best and (best.configuration.adapter_excludes, best.configuration.adapter_saves) == (("router",), ("score",))


def test_it_names_the_commits_that_were_measured(spec: Spec, facts: Facts) -> None:
    """A train.py months later trains what was measured, though the hub has moved on."""
    job = spec(model={"source": "org/model"}, dataset={"source": "org/rows"})
    dataset = DATASET.model_copy(update={"is_local": False, "revision": "b" * 40})
    made = measured(configuration(batching="sorted"), 5.0, model_revision="a" * 40, dataset=dataset)
    best = recommend("j", job, facts(), (*history(job), record(made)), {})
    assert best and (best.spec["model"]["revision"], best.spec["dataset"]["revision"]) == ("a" * 40, "b" * 40)
    text = EXPORTS["train.py"].write(best)
    assert "a" * 40 in text
    assert f'DATASET_REVISION = "{"b" * 40}"' in text
    assert recommend("j", spec(), facts(), history(spec()), {}).spec["model"]["revision"] is None  # type: ignore[union-attr]


def test_a_verification_that_died_leaves_the_best_unverified(spec: Spec, facts: Facts) -> None:
    best = recommend("j", spec(), facts(), history(spec(), 5.0), {"lora": None})
    assert best and best.stability.stable is None


def test_one_winner_a_method_and_the_fastest_leads(spec: Spec, facts: Facts) -> None:
    job = spec(method=["lora", "full"])
    records = (
        record(measured(configuration("lora", micro=8), 10.0), Origin.baseline),
        record(measured(configuration("full", micro=8), 20.0), Origin.baseline),
        record(measured(configuration("lora", batching="sorted"), 6.0)),
        record(measured(configuration("full", batching="sorted"), 5.0)),
    )
    best = recommend("j", job, facts(), records, {})
    assert best and best.configuration.method == "full" and set(best.methods) == {"lora", "full"}
    assert best.LoraConfig is None and best.methods["lora"].LoraConfig
    assert best.evidence.speedup == pytest.approx(4.0, rel=0.01)  # against its own method's baseline


def test_a_method_that_is_known_to_be_stable_leads_a_faster_one_that_is_not_verified(spec: Spec, facts: Facts) -> None:
    job, records = spec(method=["lora", "qlora"]), history(spec(), 6.0)
    base, one = (record.measurement for record in records)
    request = VerifyRequest(method="lora", baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
    soaks: dict[str, Soak | str] = {one.configuration.key: SOAK}
    judged = judge(job, request, (block(base, 10.0), block(one, 6.0)), soaks, {})
    faster = record(measured(configuration("qlora"), 5.0), Origin.baseline)
    best = recommend("j", job, facts(), (*records, faster), {"lora": judged})
    assert best and best.configuration.method == "lora" and best.stability.stable is True
    unverified = recommend("j", job, facts(), (*records, faster), {})
    assert unverified and unverified.configuration.method == "qlora"


def test_where_nothing_that_was_tried_is_stable_nothing_is_recommended(spec: Spec, facts: Facts) -> None:
    records = history(spec(), 5.0)
    base, one = (record.measurement for record in records)
    request = VerifyRequest(method="lora", baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
    soaks: dict[str, Soak | str] = {key.configuration.key: "the soak failed (crashed): no" for key in (base, one)}
    judged = judge(spec(), request, (block(base, 10.0), block(one, 5.0)), soaks, {})
    assert judged.ranking == () and recommend("j", spec(), facts(), records, {"lora": judged}) is None


def test_a_finalist_that_is_slower_than_the_baseline_is_not_rejected_for_that(spec: Spec, facts: Facts) -> None:
    """With the objective memory it is: it may not be recommended."""
    for objective, outcomes in (("wall-clock", []), ("memory", ["slower"])):
        job, records = spec(search={"objective": objective, "verify": "quick"}), history(spec(), 5.0)
        base, one = (record.measurement for record in records)
        request = VerifyRequest(method="lora", baseline=base, finalists=(one,), blocks=1, seconds_limit=60)
        judged = judge(job, request, (block(base, 10.0), block(one, 12.0)), {base.configuration.key: SOAK}, {})
        best = recommend("j", job, facts(), records, {"lora": judged})
        assert best and [rejected.outcome for rejected in best.rejected] == outcomes


def test_rejected_configurations_carry_their_reasons(spec: Spec, facts: Facts) -> None:
    records = (*history(spec(), 5.0), record(failed(configuration(attention="eager"), Outcome.unstable, "nan")))
    best = recommend("j", spec(), facts(), records, {})
    assert best and [(one.outcome, one.reason) for one in best.rejected] == [("unstable", "nan")]


def test_what_did_not_fit_is_told_with_what_did(spec: Spec, facts: Facts) -> None:
    """A baseline in bf16 may take more than fp32 does (experts on a CPU): the user learns that the model does fit."""
    reason = "not even a micro batch of 1 fits; 2.40 GiB were held"
    records = (record(failed(configuration(micro=8), reason=reason), Origin.baseline), *history(spec(), 5.0)[1:])
    best = recommend("j", spec(), facts(), records, {})
    assert best and [one.reason for one in best.rejected] == [f"{reason}; the recommended configuration took 2.00 GiB"]


def test_random_weights_are_said_plainly(spec: Spec, facts: Facts) -> None:
    job = spec(model={"source": "m", "weights": "random"})
    best = recommend("j", job, facts(), history(job, 5.0), {})
    assert best and "random" in best.weights


def test_an_unset_effective_batch_takes_the_smallest_within_a_percent(spec: Spec, facts: Facts) -> None:
    job = spec(training={})
    records = (
        record(measured(configuration(effective=64, batching="sorted"), 5.00)),
        record(measured(configuration(effective=16, batching="sorted"), 5.04)),
        record(measured(configuration(effective=8, batching="sorted"), 5.20)),
    )
    best = recommend("j", job, facts(), records, {})
    assert best and best.configuration.effective_batch_size == 16
    assert any("No effective batch was given" in note for note in best.notes)


def test_it_survives_json(spec: Spec, facts: Facts) -> None:
    best = recommend("j", spec(), facts(), history(spec(), 5.0), {})
    assert best and Recommendation.model_validate_json(best.model_dump_json()) == best
    assert best.schema_version == "1" and best.configuration.gradient_accumulation_steps == 4
    assert best.TrainingArguments["per_device_train_batch_size"] == best.configuration.micro_batch_size


def test_what_was_assumed_of_the_data_is_said_once(spec: Spec, facts: Facts) -> None:
    records = history(spec(), 5.0, 4.0)
    note = "Column 'text' holds whole numbers in 3 of 9 rows, read as text."
    dataset = DATASET.model_copy(update={"notes": (note,)})
    told = tuple(record(one.measurement.model_copy(update={"dataset": dataset})) for one in records)
    best = recommend("j", spec(), facts(), told, {})
    assert best and best.notes.count(note) == 1

"""The plan is pure: baseline first, the surrogate's trials, ablations, verification, the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Outcome, Probe
from service.contract.states import Origin
from service.contract.task import PlanInput, TrialRecord
from service.levers import LEVERS, excluded, taken_back
from service.recommend import recommend
from service.scaling import learning_rate
from tests.factory import configuration, failed, history, measured, record, timing
from worker.plan import plan
from worker.plan.budget import Budget
from worker.plan.space import point
from worker.plan.view import View

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


def known(spec: JobSpec, facts: HardwareFacts, records: tuple[TrialRecord, ...] = (), **more: Any) -> PlanInput:
    return PlanInput(spec=spec, facts=facts, history=records, next_number=len(records) + 1, **more)


def run(spec: JobSpec, facts: HardwareFacts, seconds: Callable[[Any], float]) -> tuple[list[TrialRecord], PlanInput]:
    """Plan and `measure` until no trial is asked for."""
    records: list[TrialRecord] = []
    while True:
        now = known(spec, facts, tuple(records))
        decision = plan(now)
        if not decision.trials:
            return records, now
        for request in decision.trials:
            made = measured(request.configuration, seconds(request.configuration))
            records.append(TrialRecord(request=request, measurement=made))


def uneven(made: Configuration) -> float:
    """Seconds that differ from configuration to configuration, so that there is always something to look for."""
    return 6.0 + int(made.key[:4], 16) / 2**16


def test_the_baseline_is_first_and_alone(spec: Spec, facts: Facts) -> None:
    decision = plan(known(spec(), facts(), workers=3))
    (request,) = decision.trials
    assert request.origin == "baseline" and request.configuration.micro_batch_size == 8
    assert request.configuration.levers == {name: lever.baseline for name, lever in LEVERS.items()}
    assert not plan(known(spec(), facts(), open_trials=(request,), workers=3)).trials


def test_the_same_input_gives_the_same_answer(spec: Spec, facts: Facts) -> None:
    records = history(spec(), 6.0, 5.0, 7.0)
    first, second = (plan(known(spec(search={"trials": 50}), facts(), records)) for _ in range(2))
    assert first == second and first.trials


def test_nothing_is_tried_twice(spec: Spec, facts: Facts) -> None:
    records, _ = run(spec(search={"trials": 25, "minutes": 600}), facts(), uneven)
    assert records[0].request.origin == "baseline"
    assert {one.request.origin for one in records[1:]} <= {"search", "ablation"}
    keys = [one.request.configuration.key for one in records]
    assert len(keys) == len(set(keys)) == 25


def test_the_last_trials_take_the_best_ones_levers_back(spec: Spec, facts: Facts) -> None:
    """So that the answer can say what each of them brought, in all but a quick verification."""

    def seconds(made: Configuration) -> float:
        return uneven(made) * (0.5 if made.levers["batching"] == "grouped" else 1.0)

    records, now = run(spec(search={"trials": 40, "minutes": 600, "verify": "standard"}), facts(), seconds)
    ablated = [one for one in records if one.request.origin == "ablation"]
    best = View(now, "lora").good[0].configuration
    assert ablated and len(ablated) <= 40 // 4 + 1
    assert {*taken_back(now.spec, best, records[0].request.configuration)} >= {"batching"}


def test_the_search_ends_when_nothing_is_left_to_expect(spec: Spec, facts: Facts) -> None:
    """Where no lever does anything, the surrogate learns so, long before all combinations were tried."""
    some = ["batching", "optimizer", "attention", "checkpointing", "head"]  # thousands of combinations, as of all
    job = spec(search={"trials": 400, "minutes": 6000, "levers": some})
    records, now = run(job, facts(), lambda _: 6.0)
    assert 5 < len(records) < 150
    assert any("ended before its budget" in note for note in plan(now).notes)


def test_invalid_combinations_are_never_tried(spec: Spec, facts: Facts) -> None:
    job = spec(task="sequence-classification", search={"trials": 60, "minutes": 600})
    records, _ = run(job, facts(), uneven)
    assert len(records) > 10
    assert not [one for one in records if excluded(point(one.request.configuration, job))]


def test_unavailable_choices_are_not_searched_but_named_ones_are(spec: Spec, facts: Facts) -> None:
    def precisions(job: JobSpec) -> set[str]:
        return {one.request.configuration.levers["precision"] for one in run(job, facts(), uneven)[0][1:]}

    # The checkpoint's is the baseline's, which is taken back to see what fp32 brings.
    assert {"fp32"} <= precisions(spec(search={"trials": 30, "minutes": 600})) <= {"fp32", "checkpoint"}
    named = {"fp32", "fp32-medium", "bf16-mixed", "bf16-mixed-uncached"}
    found = precisions(spec(search={"trials": 30, "minutes": 600, "levers": ["precision"]}))
    assert named <= found <= {*named, "checkpoint"}
    asked = run(spec(search={"trials": 5, "minutes": 600, "levers": ["precision"]}), facts(), lambda _: 6.0)[0]
    assert asked[1].request.configuration.levers["precision"] == "fp32"  # emulated ones are not first
    native = run(spec(search={"trials": 30, "minutes": 600}), facts(bf16_native=True), lambda _: 6.0)[0]
    assert native[1].request.configuration.levers["precision"] == "bf16-mixed"


def test_what_the_model_lacks_is_not_tried(spec: Spec, facts: Facts) -> None:
    job = spec(search={"trials": 40, "minutes": 600, "levers": ["experts"]})

    def tried(lacks: dict[str, str]) -> set[str]:
        records: list[TrialRecord] = []
        while trials := plan(known(job, facts(), tuple(records))).trials:
            configuration = trials[0].configuration
            made = measured(configuration, uneven(configuration), lacks=lacks)
            records.append(TrialRecord(request=trials[0], measurement=made))
        return {one.request.configuration.levers["experts"] for one in records}

    assert tried({}) == set(LEVERS["experts"].names)
    assert tried({"experts=eager": "llama models have no experts"}) == {"as-is", "batched", "grouped"}


def test_the_baseline_is_what_transformers_takes_where_the_model_lacks_sdpa(spec: Spec, facts: Facts) -> None:
    """As with Gemma 2, whose softcapping sdpa does not know: it is trained with eager."""
    job = spec(search={"trials": 6, "minutes": 600, "levers": ["batching"]})
    (asked,) = plan(known(job, facts())).trials
    refused = failed(asked.configuration, Outcome.invalid, "no sdpa").model_copy(
        update={"lacks": {"attention=sdpa": "Gemma2ForCausalLM does not support it"}}
    )
    records: tuple[TrialRecord, ...] = (TrialRecord(request=asked, measurement=refused),)
    decision = plan(known(job, facts(), records))
    (again,) = decision.trials
    assert again.origin == "baseline" and again.configuration.levers == asked.configuration.levers | {
        "attention": "eager"
    }
    assert decision.notes == (
        "The baseline has attention=eager, as attention=sdpa cannot be: Gemma2ForCausalLM does not support it.",
    )
    records = (*records, record(measured(again.configuration, 9.0), again.origin))
    (next_one,) = plan(known(job, facts(), records)).trials
    assert next_one.reference_loss == 9.0 and next_one.configuration.levers["attention"] == "eager"
    best = recommend("j", job, facts(), records, {})
    assert best and best.evidence.baseline and best.evidence.baseline.configuration == again.configuration


def test_a_fixed_choice_that_the_model_lacks_ends_the_job_with_a_sentence(spec: Spec, facts: Facts) -> None:
    job = spec(search={"fixed": {"attention": "sdpa"}})
    lacks = {"attention=sdpa": "Gemma2ForCausalLM does not support it"}
    refused = failed(configuration(), Outcome.invalid, "no sdpa").model_copy(update={"lacks": lacks})
    decision = plan(known(job, facts(), (record(refused, Origin.baseline),)))
    assert decision.finish and decision.error == (
        "search.fixed: attention=sdpa cannot be with this model: Gemma2ForCausalLM does not support it"
    )


def test_a_baseline_without_what_is_fixed_is_no_answer(spec: Spec, facts: Facts) -> None:
    job = spec(search={"trials": 2, "fixed": {"attention": "eager"}})
    records = (*history(job), record(failed(configuration(attention="eager"), Outcome.crashed, "it broke")))
    decision = plan(known(job, facts(), records))
    assert decision.finish and decision.error == "No configuration ran to its end. crashed: it broke."
    (first,) = plan(known(job, facts(), history(job), elapsed_seconds=1e6)).trials
    assert first.configuration.levers["attention"] == "eager", "one trial as asked for begins however late it is"
    alone = spec(method=["lora", "full"], search={"trials": 2, "fixed": {"attention": "eager"}})
    baselines = (*history(alone), record(measured(configuration("full", micro=8), 20.0), Origin.baseline, 2))
    decision = plan(known(alone, facts(), baselines))
    assert decision.finish and decision.error and "what search.fixed asks for" in decision.error


def test_fixed_choices_hold(spec: Spec, facts: Facts) -> None:
    records, _ = run(spec(search={"trials": 8, "fixed": {"attention": "eager"}}), facts(), lambda _: 6.0)
    assert {one.request.configuration.levers["attention"] for one in records[1:]} == {"eager"}


def test_changes_stay_within_what_is_fixed(spec: Spec, facts: Facts) -> None:
    """The baseline may be the best so far, and lies outside: nothing is made of it."""
    records, _ = run(
        spec(search={"trials": 12, "fixed": {"attention": "eager"}}),
        facts(),
        lambda made: 6.0 + (made.levers["attention"] == "eager"),
    )
    assert {one.request.configuration.levers["attention"] for one in records[1:]} == {"eager"}


def test_a_fixed_choice_that_cannot_run_fails_with_its_sentence(spec: Spec, facts: Facts) -> None:
    decision = plan(known(spec(search={"fixed": {"precision": "tf32"}}), facts()))
    assert decision.finish and decision.error and "needs an NVIDIA GPU" in decision.error


def test_qlora_without_bitsandbytes_fails_with_a_sentence(spec: Spec, facts: Facts) -> None:
    decision = plan(known(spec(method="qlora"), facts(packages={})))
    assert decision.finish and decision.error and "needs" in decision.error
    both = plan(known(spec(method=["full", "qlora"]), facts(packages={})))
    assert both.trials and both.notes and "qlora" in both.notes[0]


def test_every_method_gets_its_baseline_and_its_share(spec: Spec, facts: Facts) -> None:
    records, _ = run(spec(method=["lora", "full"], search={"trials": 10, "minutes": 600}), facts(), uneven)
    methods = [one.request.configuration.method for one in records]
    assert methods.count("lora") == methods.count("full") == 5


def test_trials_carry_what_was_learnt(spec: Spec, facts: Facts) -> None:
    records = history(spec(), 6.0)
    (request,) = plan(known(spec(), facts(), records)).trials
    assert request.best_seconds == 6.0 and request.reference_loss == 9.0 and request.reference_grad_norm == 1.0
    assert request.confirm_largest is False  # quick: an earlier trial has run its largest


def test_workers_get_a_trial_each(spec: Spec, facts: Facts) -> None:
    decision = plan(known(spec(search={"trials": 30}), facts(), history(spec(), 6.0), workers=3))
    assert len({request.configuration.key for request in decision.trials}) == 3


def test_the_time_budget_ends_the_search(spec: Spec, facts: Facts) -> None:
    records = history(spec(), 6.0, 5.0)
    job = spec(search={"minutes": 10, "trials": 100})
    assert plan(known(job, facts(), records, elapsed_seconds=100)).trials
    late = plan(known(job, facts(), records, elapsed_seconds=449))
    assert not late.trials and late.verify is not None
    assert late.verify.seconds_limit == 151  # what the trials left
    too_late = plan(known(job, facts(), records, elapsed_seconds=590))
    assert too_late.verify is not None and too_late.verify.seconds_limit == 60  # a tenth more than the job's minutes
    needed = too_late.verify.expected_seconds
    assert needed > 70 and too_late.notes[-1] == (
        f"search.minutes is 10; the verification is expected to take about {needed:.0f} s, so the job ends about "
        f"{needed - 10:.0f} s later than asked."
    )
    overrun = plan(known(job, facts(), records, elapsed_seconds=640))
    assert overrun.verify is not None and overrun.verify.seconds_limit == 20  # what is left of that tenth
    long_over = plan(known(job, facts(), records, elapsed_seconds=700))
    assert long_over.verify is not None and long_over.verify.seconds_limit == 1  # one block, and a soak


def test_a_verification_that_fits_is_not_announced(spec: Spec, facts: Facts) -> None:
    decision = plan(known(spec(search={"minutes": 60, "trials": 3}), facts(), history(spec(), 6.0, 5.0)))
    assert decision.verify is not None and not any("later than asked" in note for note in decision.notes)


def test_a_compiled_trial_needs_room_for_compiling_it_twice(spec: Spec, facts: Facts) -> None:
    job = spec(search={"minutes": 10, "trials": 60})  # one trial took 10 s, compiling takes 25
    records, here = history(job, 5.0), facts(cores=8)
    most = Budget(known(job, here, records, elapsed_seconds=0)).left()
    early, late = (Budget(known(job, here, records, elapsed_seconds=most - left)) for left in (61, 59))
    compiled = configuration(compile="per-layer")
    assert early.affords(compiled) and not late.affords(compiled) and late.affords(configuration())
    slow = record(measured(configuration(compile="per-layer", padding="multiple-64"), compile_seconds=50.0))
    budget = Budget(known(job, facts(cores=2), (*records, slow), elapsed_seconds=0))
    assert budget.compiling(compiled) == 50.0, "as long as it took in this job"


@pytest.mark.parametrize(
    ("hardware", "seconds"),
    [
        ({"cores": 2}, 100.0),
        ({"cores": 4}, 50.0),
        ({"cores": 64}, 25.0),
        ({"cores": 2, "device": "cuda", "has_own_memory": True}, 25.0),
    ],
)
def test_few_cores_compile_slowly(spec: Spec, facts: Facts, hardware: dict[str, Any], seconds: float) -> None:
    budget = Budget(known(spec(), facts(**hardware), history(spec())))
    assert budget.compiling(configuration(compile="per-layer")) == seconds


def test_before_any_other_trial_the_baseline_says_what_there_is_time_for(spec: Spec, facts: Facts) -> None:
    """The baseline took 20 s, so that a compiled one needs 70."""
    records = history(spec(search={"minutes": 10}))
    budgets = [
        Budget(known(spec(search={"minutes": 10}), facts(cores=8), records, elapsed_seconds=left))
        for left in (100, 400)
    ]
    assert [one.affords(configuration(compile="per-layer")) for one in budgets] == [True, False]
    assert plan(known(spec(search={"minutes": 1}), facts(), records, elapsed_seconds=20)).trials, "one is tried anyhow"


def test_one_trial_begins_however_long_the_baseline_took(spec: Spec, facts: Facts) -> None:
    job, records = spec(search={"minutes": 3}), history(spec(), 50.0)
    alone = plan(known(job, facts(), records[:1], elapsed_seconds=170))
    assert len(alone.trials) == 1 and not alone.trials[0].configuration.micro_batch_size
    assert not plan(known(job, facts(), records, elapsed_seconds=170)).trials, "one was tried"


def test_a_trial_may_take_a_few_times_the_longest_so_far(spec: Spec, facts: Facts) -> None:
    (request,) = plan(known(spec(), facts(), history(spec(), 30.0))).trials
    assert request.seconds_limit == 3 * 60.0


def test_a_trial_that_others_disturbed_is_repeated_but_not_one_that_nobody_can_tell_of(
    spec: Spec, facts: Facts
) -> None:
    job = spec(search={"trials": 60, "minutes": 600, "fixed": {name: one.baseline for name, one in LEVERS.items()}})

    def repeats(share: float | None) -> int:
        made = measured(configuration(), 5.0, curve=(timing(6.0, micro=4),))
        assert made.timing is not None
        taken = made.timing.model_copy(update={"clean_share": share})
        records = (*history(job), record(made.model_copy(update={"timing": taken})))
        return sum(one.origin == "repeat" for one in plan(known(job, facts(), records)).trials)

    assert (repeats(0.3), repeats(1.0), repeats(None)) == (1, 0, 0)


def test_after_verification_the_job_ends(spec: Spec, facts: Facts) -> None:
    decision = plan(known(spec(search={"trials": 2}), facts(), history(spec(), 5.0), verified_methods=("lora",)))
    assert decision.finish and decision.error is None
    waiting = plan(known(spec(search={"trials": 2}), facts(), history(spec(), 5.0), verify_open=True))
    assert not waiting.finish and waiting.phase == "verifying"


def test_when_nothing_fits_the_answer_says_what_would_help(spec: Spec, facts: Facts) -> None:
    small = failed(configuration(batching="sorted"))
    small = small.model_copy(update={"probes": (Probe(micro_batch_size=1, peak_bytes=2 << 30),)})
    first = record(failed(configuration(micro=8)), Origin.baseline)
    records = (first, record(failed(configuration()), Origin.baseline), record(small))
    decision = plan(known(spec(search={"trials": 2}), facts(), records))
    assert decision.finish and decision.error
    assert "2.00 GiB" in decision.error and "qlora" in decision.error


def test_other_failures_are_told_by_reason(spec: Spec, facts: Facts) -> None:
    broken = failed(configuration(micro=8), Outcome.crashed, "it broke")
    records = (record(broken, Origin.baseline), record(failed(configuration(batching="sorted"))))
    decision = plan(known(spec(search={"trials": 2}), facts(), records))
    assert decision.error and "it broke" in decision.error


def test_a_failed_baseline_does_not_stop_the_search(spec: Spec, facts: Facts) -> None:
    records = (record(failed(configuration(micro=8), Outcome.crashed), Origin.baseline),)
    (request,) = plan(known(spec(), facts(), records)).trials
    assert request.origin == "search" and request.reference_loss is None


def test_a_baseline_that_does_not_fit_is_measured_at_what_does(spec: Spec, facts: Facts) -> None:
    """As its user would lower the batch: the speed-up is over something that runs."""
    records: tuple[TrialRecord, ...] = (record(failed(configuration(micro=8)), Origin.baseline),)
    decision = plan(known(spec(), facts(), records))
    (again,) = decision.trials
    assert again.origin == "baseline" and again.configuration == configuration()
    assert "did not fit at its micro batch of 8" in decision.notes[0] and "if any does" in decision.notes[0]
    ran = (*records, record(measured(configuration(), 20.0), Origin.baseline))
    (request,) = plan(known(spec(), facts(), ran)).trials
    assert request.origin == "search" and request.reference_loss == 9.0
    best = recommend("j", spec(), facts(), (*ran, record(measured(configuration(batching="sorted"), 5.0))), {})
    assert best and best.evidence.speedup and best.evidence.speedup > 3
    hopeless = (*records, record(failed(configuration()), Origin.baseline))
    (request,) = plan(known(spec(), facts(), hopeless)).trials
    assert request.origin == "search" and request.reference_loss is None


def test_an_unset_effective_batch_is_searched_with_a_scaled_learning_rate(spec: Spec, facts: Facts) -> None:
    job = spec(training={"learning_rate": 1e-4}, search={"trials": 40, "minutes": 600})
    records, _ = run(job, facts(), lambda made: 100.0 / made.effective_batch_size)
    sizes = {one.request.configuration.effective_batch_size for one in records}
    assert sizes > {8} and max(sizes) * 50 <= 1000  # 50 optimizer steps an epoch of 1,000 rows
    rates = {one.request.configuration.effective_batch_size: one.request.configuration.learning_rate for one in records}
    assert rates[8] == 1e-4 and rates[16] == pytest.approx(1e-4 * 2**0.5, rel=1e-5)


def test_the_rate_of_the_users_own_batch_is_for_that_batch(spec: Spec, facts: Facts) -> None:
    mine = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16, "optim": "sgd"}
    job = spec(baseline=mine, training={"learning_rate": 1e-4})
    (request,) = plan(known(job, facts())).trials
    assert (request.configuration.effective_batch_size, request.configuration.learning_rate) == (64, 1e-4)
    assert learning_rate(job, "lora", 16, "adamw-fused") == pytest.approx(0.5e-4)
    assert learning_rate(job, "lora", 16, "sgd") == 0.25e-4
    best = recommend("j", job, facts(), (record(measured(request.configuration), Origin.baseline),), {})
    (said,) = [one for one in best.notes if one.startswith("No effective batch")] if best else []
    assert "chose 64" in said and said.endswith("the learning rate is 0.0001, as given.")


def test_the_users_own_baseline(spec: Spec, facts: Facts) -> None:
    mine = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "optim": "adamw_bnb_8bit",
        "gradient_checkpointing": True,
        "logging_steps": 10,
    }
    decision = plan(known(spec(baseline=mine), facts()))
    (request,) = decision.trials
    levers = request.configuration.levers
    assert (levers["precision"], levers["optimizer"], levers["checkpointing"]) == (
        "bf16-mixed",
        "adamw-8bit-stable-embedding",
        "full",
    )
    assert request.configuration.micro_batch_size == 4 and request.configuration.effective_batch_size == 32
    assert any("logging_steps" in note for note in decision.notes) and any("became" in note for note in decision.notes)

"""The objective memory: the least peak of what is not slower than the baseline, in every place that orders."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, MemoryLine, Outcome, Soak
from service.contract.objective import is_slower, ranked
from service.contract.states import Origin
from service.contract.task import TrialRecord, VerifyRequest
from service.levers import chosen
from tests.factory import block, configuration, measured, record, timing
from tests.plan.test_plan import known
from worker.plan import plan
from worker.plan.finalists import finalists
from worker.plan.proposers.micro_batches import pending
from worker.plan.ratios import certainly_slower, settled
from worker.plan.verdicts import judge
from worker.plan.view import View

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]
GIB = 1 << 30
GPU = {"device": "cuda", "capability": (9, 0), "has_own_memory": True, "memory_bytes": 24 << 30, "bf16_native": True}
BASE = measured(configuration(micro=8), 10.0, peak_bytes=8 * GIB)
FAST = measured(configuration(batching="grouped"), 5.0, peak_bytes=6 * GIB)
SLIM = measured(configuration(checkpointing="full"), 9.0, peak_bytes=4 * GIB)
TWIN = measured(configuration(checkpointing="full", batching="grouped"), 7.0, peak_bytes=int(4.02 * GIB))
SLOW = measured(configuration(checkpointing="offloaded"), 12.0, peak_bytes=2 * GIB)


@pytest.fixture
def job(spec: Spec) -> JobSpec:
    return spec(search={"objective": "memory", "minutes": 6000, "trials": 20, "verify": "standard"})


def for_memory(job: JobSpec, facts: HardwareFacts, *others: Measurement) -> View:
    records = (record(BASE, Origin.baseline), *map(record, others))
    return View(known(job, facts, records), "lora")


def test_the_least_peak_leads_the_faster_of_equals_first_and_what_is_slower_comes_last(job: JobSpec) -> None:
    slower = SLOW.model_copy(update={"configuration": configuration(attention="eager"), "timing": timing(11.0)})
    order = ranked(job, [FAST, SLOW, BASE, slower, SLIM, TWIN], {"lora": BASE})
    assert order == [TWIN, SLIM, FAST, BASE, slower, SLOW]
    assert ranked(job, [FAST, SLOW, SLIM])[0] == SLOW, "without a baseline there is nothing to be slower than"


def test_one_percent_is_not_slower(job: JobSpec, spec: Spec) -> None:
    about, more = (BASE.model_copy(update={"timing": timing(seconds)}) for seconds in (10.09, 10.2))
    assert not is_slower(job, about, BASE) and is_slower(job, more, BASE)
    assert not is_slower(spec(), SLOW, BASE), "it rules out nothing where time is the objective"


def test_the_plan_is_told_what_a_trial_may_take(job: JobSpec, spec: Spec, facts: Facts) -> None:
    """Of the whole run, load included: 3 x 1000 / 64 units of 10 seconds and one second more."""
    request = for_memory(job, facts(), FAST).request(configuration(head="chunked"), Origin.search)
    assert request.slowest_run_seconds == pytest.approx(1.0 + 3 * 1000 / 64 * 10)
    assert request.best_seconds == 10.0, "what is slower than the fastest may be the best"
    other = View(known(spec(), facts(), (record(BASE, Origin.baseline), record(FAST))), "lora")
    request = other.request(configuration(head="chunked"), Origin.search)
    assert request.slowest_run_seconds is None and request.best_seconds == 5.0


def test_finalists_are_those_of_the_least_peak(job: JobSpec, facts: Facts) -> None:
    view = for_memory(job, facts(), FAST, SLIM, TWIN, SLOW)
    assert view.score(SLOW) == math.inf and view.best() == TWIN
    assert finalists(view) == [SLIM, TWIN]
    decision = plan(
        known(
            job.model_copy(update={"search": job.search.model_copy(update={"trials": 5})}),
            facts(),
            tuple(view.known.history),
        )
    )
    assert decision.verify and decision.verify.baseline == BASE and decision.verify.reserves == (FAST, SLOW)


@pytest.mark.parametrize(("seconds", "sizes"), [(5.0, [4]), (9.0, [16, 4])])
def test_a_larger_micro_batch_is_tried_only_to_fall_back_on(
    job: JobSpec, spec: Spec, facts: Facts, seconds: float, sizes: list[int]
) -> None:
    """Where the best may have been measured in a fast minute: blocks may find it slower than the baseline's 10 s."""
    best = measured(configuration(batching="grouped"), seconds, predicted_micro_batch=32, peak_bytes=4 * GIB)
    assert [one.micro_batch_size for one in pending(for_memory(job, facts(), best))] == sizes
    fast = View(known(spec(), facts(), (record(BASE, Origin.baseline), record(best))), "lora")
    assert [one.micro_batch_size for one in pending(fast)] == [16, 4], "of time, both"
    alone = View(known(job, facts(), (record(best),)), "lora")
    assert [one.micro_batch_size for one in pending(alone)] == [4], "no baseline that it could be slower than"


def judged(job: JobSpec, seconds: dict[str, float], soaks: dict[str, Soak | str] | None = None) -> Any:
    """A verification of SLIM, TWIN and FAST, each of which took so many seconds in its block."""
    made = {"base": BASE, "slim": SLIM, "twin": TWIN, "fast": FAST}
    request = VerifyRequest(method="lora", baseline=BASE, finalists=(SLIM, TWIN, FAST), blocks=8, seconds_limit=60)
    blocks = tuple(block(made[name], took, number) for number in range(3) for name, took in seconds.items())
    by_key = {one.configuration.key: name for name, one in made.items()}
    found = judge(job, request, blocks, {made[name].configuration.key: one for name, one in (soaks or {}).items()}, {})
    slower = {by_key[key] for key in certainly_slower(job, request, blocks)}
    return [by_key[key] for key in found.ranking], slower, settled(job, request, blocks), found


def test_blocks_reject_what_is_slower_than_the_baseline(job: JobSpec) -> None:
    ranking, slower, done, _ = judged(job, {"base": 10.0, "slim": 9.0, "twin": 7.0, "fast": 5.0})
    assert ranking == ["twin", "slim", "fast", "base"] and slower == set() and done
    ranking, *_ = judged(job, {"base": 10.0, "slim": 10.05, "fast": 5.0})
    assert ranking == ["slim", "fast", "base"], "less than one percent is not slower"
    ranking, slower, done, found = judged(job, {"base": 10.0, "slim": 11.0, "twin": 10.5, "fast": 5.0})
    assert ranking == ["fast", "base"] and slower == {"slim", "twin"} and done
    assert all(one.stable for one in found.verdicts), "it is slower, not unstable"
    _, slower, done, _ = judged(job, {"base": 10.0, "slim": 10.0, "twin": 10.0, "fast": 5.0})
    assert slower == set() and not done, "whether they are slower is not known yet"
    _, slower, done, _ = judged(job, {"base": 10.0, "slim": 10.2, "twin": 7.0, "fast": 5.0})
    assert slower == set() and not done, "it seems slower, and need not be"


def test_what_has_failed_is_not_waited_for_and_another_peak_is_no_tie(job: JobSpec) -> None:
    *_, done, found = judged(job, {"base": 10.0, "slim": 7.0, "fast": 7.0})
    assert done and not found.tied, "as fast, with another peak"
    *_, done, found = judged(job, {"base": 10.0, "twin": 5.0, "fast": 5.0})
    assert done, "the one of the least peak has no block"
    *_, found = judged(job, {"base": 10.0, "slim": 7.0, "twin": 7.0})
    assert found.tied


def test_the_soak_proves_the_peak(job: JobSpec) -> None:
    seconds = {"base": 10.0, "slim": 9.0, "twin": 7.0, "fast": 5.0}
    ranking, *_ = judged(job, seconds, {"twin": Soak(micro_batch_size=8, steps=3, peak_bytes=7 * GIB)})
    assert ranking == ["slim", "fast", "twin", "base"], "it took more than its trial had seen"


def test_where_the_baseline_may_not_be_recommended_the_fastest_of_the_slower_is(spec: Spec) -> None:
    fixed = {"checkpointing": "full"}
    job = spec(search={"objective": "memory", "fixed": fixed})
    ranking, *_ = judged(job, {"base": 10.0, "slim": 11.0, "twin": 10.5, "fast": 12.0})
    assert ranking == ["twin", "slim"]


def run(job: JobSpec, facts: HardwareFacts) -> list[TrialRecord]:
    """Trials on a device where memory and time follow from the levers, and small micro batches take longer."""

    def trial(made: Configuration, limit: float | None) -> Measurement:
        activations = math.prod(choice.memory.activations for choice in chosen(made.levers))
        about = random.Random(str(sorted(made.levers.items()))).uniform(0.95, 1.05)
        slow = (0.6 if made.levers["precision"].startswith("bf16") else 1.0) * about
        slow *= {"off": 1.0, "offloaded": 1.6}.get(made.levers["checkpointing"], 1.3)
        seconds = {size: 64 * slow * (0.15 / size + 0.08) for size in (1, 2, 4, 8, 16, 32)}
        fits = [size for size in seconds if limit is None or 3000 / 64 * seconds[size] <= limit]
        micro = made.micro_batch_size or min(fits, default=32)
        line = MemoryLine(rest_bytes=2e9, slope_bytes=4e8 * activations)
        return measured(
            made,
            micro_batch_size=micro,
            timing=timing(seconds[micro], micro=micro),
            memory_line=line,
            peak_bytes=int(line.at(micro)),
            load_seconds=0.0,
            capacity_bytes=24 * GIB,
            parameters=10**9,
            trainable_parameters=10**7,
            predicted_micro_batch=32,
        )

    records: list[TrialRecord] = []
    while trials := plan(known(job, facts, tuple(records))).trials:
        records += [
            TrialRecord(request=one, measurement=trial(one.configuration, one.slowest_run_seconds)) for one in trials
        ]
    return records


def test_the_search_goes_for_memory(job: JobSpec, facts: Facts) -> None:
    """It ends far below the baseline's 5.2 GB at what little memory no levers change and small micro batches."""
    records = run(job, facts(**GPU))
    best = View(known(job, facts(**GPU), tuple(records)), "lora").good[0]
    assert best.outcome is Outcome.ok and best.peak_bytes and records[0].measurement.peak_bytes
    assert best.peak_bytes < 2.2e9 < records[0].measurement.peak_bytes / 2 and len(records) <= 20
    assert not is_slower(job, best, records[0].measurement)
    early = min(one.measurement.peak_bytes or 0 for one in records[1:4])
    assert early < 2.3e9, "the catalogue's factors lead there from the first trials on"
    assert run(job, facts(**GPU)) == records, "the same history gives the same plan"

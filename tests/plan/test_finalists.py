"""Which trials are verified: the fastest, what may be as fast, and as many as there is time for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.states import Origin
from tests.factory import configuration, history, measured, record, timing
from tests.plan.test_plan import known
from worker.plan import plan
from worker.plan.budget import verification_seconds
from worker.plan.finalists import RESERVES, affordable, finalists, verification
from worker.plan.view import View

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


def test_where_no_verification_of_all_finalists_fits_there_are_fewer(spec: Spec, facts: Facts) -> None:
    """Two blocks of the baseline (10 s) and of every finalist (4 to 4.8), a proof and a soak: 145 to 175 s."""
    records, job = history(spec(), 4.8, 4.4, 4.0), spec(search={"minutes": 5, "trials": 4, "verify": "quick"})

    def finalists(elapsed: float) -> list[float]:
        decision = plan(known(job, facts(), records, elapsed_seconds=elapsed))
        assert decision.verify is not None
        return [one.timing.seconds for one in decision.verify.finalists if one.timing]

    assert finalists(120) == [4.0, 4.4, 4.8]  # 180 s are left
    assert finalists(135) == [4.0, 4.4]
    assert finalists(290) == [4.0]


def test_finalists_are_the_fast_ones(spec: Spec, facts: Facts) -> None:
    records = history(spec(), 5.0, 5.2, 9.0)
    decision = plan(known(spec(search={"trials": 4, "verify": "standard"}), facts(), records))
    assert decision.verify and decision.verify.baseline
    assert [one.timing.seconds for one in decision.verify.finalists if one.timing] == [5.0, 5.2]


@pytest.mark.parametrize(
    ("verify", "other", "finalists"),
    [("quick", 5.0, [4.0, 4.5, 5.0]), ("quick", 5.1, [4.0, 4.1, 4.5]), ("standard", 5.0, [4.0, 4.1, 4.5])],
)
def test_other_batchings_are_finalists_where_drift_may_have_slowed_them(
    spec: Spec, facts: Facts, verify: str, other: float, finalists: list[float]
) -> None:
    made = (
        ("packed", "logits", 4.0),
        ("packed", "chunked", 4.1),
        ("sorted", "logits", 4.5),
        ("grouped", "logits", other),
    )
    found = [record(measured(configuration(batching=batching, head=head), at)) for batching, head, at in made]
    records = (*history(spec()), *found)
    decision = plan(known(spec(search={"trials": len(records), "verify": verify}), facts(), records))
    assert decision.verify
    assert [one.timing.seconds for one in decision.verify.finalists if one.timing] == finalists
    assert not {*finalists} & {one.timing.seconds for one in decision.verify.reserves if one.timing}


@pytest.mark.parametrize("verify", ["quick", "standard"])
def test_a_simpler_one_and_another_size_are_finalists_where_they_are_about_as_fast(
    spec: Spec, facts: Facts, verify: str
) -> None:
    best = measured(configuration(batching="grouped", attention="eager"), 5.0)
    simpler = measured(configuration(batching="grouped"), 5.05)
    other = measured(configuration(micro=16, batching="grouped", attention="eager"), 5.3)
    packed = measured(configuration(batching="packed"), 5.2)
    records = (*history(spec()), *map(record, (best, simpler, other, packed)))
    view = View(known(spec(search={"verify": verify}), facts(), records), "lora")
    assert finalists(view) == [best, simpler, other], "each once"


@pytest.mark.parametrize(
    ("spread", "slower", "is_one"),
    [(0.001, 5.08, True), (0.001, 5.2, False), (0.05, 5.2, True), (0.05, 5.6, False), (0.2, 5.6, False)],
)
def test_a_simpler_one_is_a_finalist_where_the_intervals_leave_open_that_it_is_as_fast(
    spec: Spec, facts: Facts, spread: float, slower: float, is_one: bool
) -> None:
    best = measured(configuration(batching="grouped", attention="eager"), timing=timing(5.0, spread))
    other = measured(configuration(batching="grouped", head="chunked"), timing=timing(5.01, spread))
    third = measured(configuration(batching="grouped", padding="multiple-8"), timing=timing(5.02, spread))
    simpler = measured(configuration(batching="grouped"), timing=timing(slower, spread))
    records = (*history(spec()), *map(record, (best, other, third, simpler)))
    view = View(known(spec(search={"verify": "standard"}), facts(), records), "lora")
    assert (simpler in finalists(view)) is is_one


@pytest.mark.parametrize("verify", ["quick", "standard"])
def test_those_without_a_lever_are_compared_in_turns_and_are_reserves_as_others_are(
    spec: Spec, facts: Facts, verify: str
) -> None:
    best = measured(configuration(batching="grouped", attention="eager"), 5.0)
    without = measured(configuration(attention="eager"), 7.0)
    other = measured(configuration(batching="packed"), 7.5)
    records = (*history(spec()), *map(record, (best, without, other)))
    decision = plan(known(spec(search={"trials": len(records), "verify": verify}), facts(), records))
    assert decision.verify
    assert decision.verify.taken_back == (() if verify == "quick" else (without,))
    assert {one.configuration.key for one in (without, other)} <= {
        one.configuration.key for one in decision.verify.reserves
    }, "where every finalist fails for one lever, one without it may hold"


def test_a_verification_takes_the_warm_up_of_its_blocks(spec: Spec, facts: Facts) -> None:
    """Where first calls of a shape are slower, a block begins with about a pass over the unit."""
    job, gpu = spec(search={"verify": "quick"}), facts(has_own_memory=True)
    long = measured(configuration(precision="bf16-mixed"), 20.0)
    cold, warm = verification_seconds(job, facts(), [long]), verification_seconds(job, gpu, [long])
    assert warm - cold == pytest.approx(2 * 20.0), "a pass more in each of two blocks"
    compiled = measured(configuration(precision="bf16-mixed", compile="per-layer"), 20.0)
    assert verification_seconds(job, facts(), [compiled]) == pytest.approx(warm)


def test_the_baseline_is_verified_beside_the_finalists_and_is_none_of_them(spec: Spec, facts: Facts) -> None:
    """Nor is it a reserve, or what a finalist is compared with for one of its levers. What it takes is planned for."""
    best = measured(configuration(batching="grouped"), 5.0)
    others = [measured(configuration(precision="fp32", padding=one), 9.0) for one in ("multiple-8", "multiple-64")]
    more = [measured(configuration(precision="fp32", head=one), 9.5) for one in ("logits", "chunked")]
    base = measured(configuration(), 5.5)
    records = (record(base, Origin.baseline), *map(record, (best, *others, *more)))
    job = spec(search={"trials": len(records), "verify": "standard"})
    decision = plan(known(job, facts(), records))
    assert decision.verify and decision.verify.baseline == base
    assert decision.verify.finalists == (best,) and decision.verify.taken_back == ()
    assert len(decision.verify.reserves) == RESERVES and base not in decision.verify.reserves
    assert decision.verify.expected_seconds == pytest.approx(verification_seconds(job, facts(), [base, best]))


@pytest.mark.parametrize(("objective", "count"), [("wall-clock", 2), ("memory", 1)])
def test_for_memory_other_batchings_are_not_looked_for(spec: Spec, facts: Facts, objective: str, count: int) -> None:
    """Of memory trials tell enough; and what saves none of it need not be compared in turns for its time."""
    job = spec(search={"objective": objective, "verify": "standard"})
    base = record(measured(configuration(micro=8), 10.0, peak_bytes=20 << 30), Origin.baseline)
    best = measured(configuration(batching="grouped", attention="eager"), 5.0, peak_bytes=10 << 30)
    other = measured(configuration(batching="packed"), 6.0, peak_bytes=12 << 30)
    simpler = measured(configuration(batching="grouped"), 7.0, peak_bytes=15 << 30)
    view = View(known(job, facts(), (base, *map(record, (best, other, simpler)))), "lora")
    assert finalists(view) == [best, other][:count]
    request = verification([view])
    assert request is not None and request.taken_back == ((simpler,) if objective == "wall-clock" else ())


def test_of_simpler_ones_only_the_fastest_is_verified(spec: Spec, facts: Facts) -> None:
    """Three are verified at most: the two fastest would leave no place for another size."""
    best = measured(configuration(batching="grouped", attention="eager", head="chunked"), 5.0)
    simpler = [
        measured(configuration(batching="grouped", attention="eager"), 5.05),
        measured(configuration(batching="grouped", head="chunked"), 5.08),
    ]
    other = measured(configuration(micro=16, batching="grouped", attention="eager", head="chunked"), 5.3)
    records = (*history(spec()), *map(record, (best, *simpler, other)))
    view = View(known(spec(search={"verify": "quick"}), facts(), records), "lora")
    assert finalists(view) == [best, simpler[0], other]


def test_methods_that_are_still_to_be_verified_share_the_time(spec: Spec, facts: Facts) -> None:
    job = spec(method=["lora", "full"], search={"minutes": 60, "verify": "quick"})
    records = (
        record(measured(configuration(micro=8), 10.0), Origin.baseline),
        record(measured(configuration("full", micro=8), 10.0), Origin.baseline),
        record(measured(configuration(batching="sorted"), 5.0)),
    )
    view = View(known(job, facts(), records), "lora")
    alone, shared = verification([view]), verification([view, view])
    assert alone is not None and shared is not None
    assert shared.seconds_limit == pytest.approx(alone.seconds_limit / 2)
    assert shared.seconds_limit == pytest.approx(view.budget.verify_seconds(2)), "it ends by then"


def test_as_many_finalists_are_verified_as_fit_beside_the_baseline(spec: Spec, facts: Facts) -> None:
    """The fastest is, however little time is left."""
    job, base = spec(search={"verify": "quick"}), measured(configuration(micro=8), 10.0)
    best = [measured(configuration(batching=one), at) for one, at in (("sorted", 4.0), ("grouped", 5.0))]
    enough = verification_seconds(job, facts(), [base, *best])
    assert affordable(job, facts(), best, [base], enough) == best
    assert affordable(job, facts(), best, [base], enough - 1.0) == affordable(job, facts(), best, [base], 0) == best[:1]

"""What a search's time and memory are taken for: short trials, few finalists, formats of the checkpoint's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import PREPARE, MemoryLine
from service.contract.states import Origin
from tests.factory import configuration, history, measured, record, timing
from tests.plan.test_plan import known
from worker.plan import plan
from worker.plan.acquisition import Acquisition
from worker.plan.budget import Budget, warm_seconds
from worker.plan.expected_memory import expected
from worker.plan.feasibility import Feasibility
from worker.plan.grid import Grid
from worker.plan.proposers.improvement import promising
from worker.plan.view import View

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


def test_where_minutes_end_the_search_a_trial_costs_what_it_takes(spec: Spec, facts: Facts) -> None:
    """Trials took 10 s without what one of them compiled, and compiling takes 25."""
    compiled = record(measured(configuration(compile="per-layer"), 5.0, compile_seconds=25.0), number=3)
    compiled = compiled.model_copy(
        update={"measurement": compiled.measurement.model_copy(update={"time_spent": {"timing": 10, "compile": 25}})}
    )
    records = (*history(spec(), 5.0), compiled)
    asked = (configuration(padding="multiple-8"), configuration(compile="per-layer", padding="multiple-8"))
    short = Budget(known(spec(search={"minutes": 20, "trials": 1000}), facts(cores=8), records))
    assert [short.cost(one) for one in asked] == [10.0, 35.0]
    counted = Budget(known(spec(search={"minutes": 600, "trials": 10}), facts(cores=8), records))
    assert [counted.cost(one) for one in asked] == [1.0, 1.0], "the count of trials ends it"
    begun = Budget(known(spec(search={"minutes": 20, "trials": 1000}), facts(cores=8), records[:1]))
    assert [begun.cost(one) for one in asked] == [1.0, 1.0], "nothing tells how long a trial takes"


def test_workers_share_what_time_is_left(spec: Spec, facts: Facts) -> None:
    """As many trials as one worker has time for, for each of them, but those that are under way."""
    job, records = spec(search={"minutes": 20, "trials": 1000}), history(spec(), 5.0)
    alone = Budget(known(job, facts(), records)).trials_left(0)
    assert 10 < alone < 1000
    together = known(job, facts(), records, workers=4)
    assert Budget(together).trials_left(0) == pytest.approx(4 * alone)
    assert Budget(together).trials_left(3) == pytest.approx(4 * alone - 3)
    many = known(spec(search={"minutes": 20, "trials": int(3 * alone)}), facts(), records, workers=4)
    assert Budget(many).cost(configuration(padding="multiple-8")) == 1.0, "for four workers the count of trials ends it"


def test_a_verification_is_kept_what_it_takes_between_a_quarter_and_half_of_the_minutes(
    spec: Spec, facts: Facts
) -> None:
    """Blocks of a baseline and finalists of some seconds, a proof and a soak: about three minutes."""

    def kept(minutes: int) -> float:
        budget = Budget(known(spec(search={"minutes": minutes}), facts(), history(spec(), 4.8, 4.4, 4.0)))
        return 1 - budget.left() / (60 * minutes)

    assert kept(60) == pytest.approx(0.25) and kept(1) == pytest.approx(0.5)
    assert 0.25 < kept(8) < 0.5


def test_what_is_as_promising_and_shorter_comes_first(
    spec: Spec, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, short = configuration(compile="per-layer"), configuration(padding="multiple-8")
    found = [(slow, 0.03), (short, 0.02)]
    monkeypatch.setattr(Acquisition, "best", lambda _, switches: found if switches == 1 else [])
    monkeypatch.setattr(Acquisition, "left", lambda _: 0.05)

    def order(**search: int) -> list[Configuration]:
        view = View(known(spec(search=search), facts(cores=8), history(spec(), 5.0)), "lora")
        return list(promising(view))

    assert order(minutes=20, trials=1000) == [short, slow], "it takes 10 s, and the other 25 s more"
    assert order(minutes=600, trials=10) == [slow, short]


def test_a_search_goes_on_while_all_that_is_left_promises_enough_together(
    spec: Spec, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen untried choices may promise 0.3% each: none of them much, and one of them is good."""
    few = configuration(padding="multiple-8")
    monkeypatch.setattr(Acquisition, "best", lambda _, switches: [(few, 0.003)])
    view = View(known(spec(), facts(), history(spec(), 5.0)), "lora")
    for together, goes_on in ((0.02, True), (0.009, False)):
        monkeypatch.setattr(Acquisition, "left", lambda _, left=together: left)
        assert (few in promising(view)) is goes_on


def test_two_finalists_are_verified_where_a_block_takes_minutes(spec: Spec, facts: Facts) -> None:
    """The time of a third one is that of several trials. It is no longer kept for the verification, either."""
    job = spec(search={"minutes": 600, "trials": 4, "verify": "quick"})
    for seconds, count in ((10.0, 3), (35.0, 2)):
        records = history(job, seconds, seconds * 1.01, seconds * 1.02)
        decision = plan(known(job, facts(), records))
        assert decision.verify is not None and len(decision.verify.finalists) == count
    short = spec(search={"minutes": 25, "trials": 4, "verify": "quick"})
    alone = tuple(record(one.measurement, number=at) for at, one in enumerate(records, 1))
    left = [Budget(known(short, facts(), some)).left() for some in (records, alone)]
    assert left[0] < left[1], "without a baseline that ran, there is one fewer in a block"


def test_a_checkpoint_of_16_bits_needs_no_more_memory_in_its_own_format_than_under_autocast(
    spec: Spec, facts: Facts
) -> None:
    """It was taken to keep twice as many bytes, so that on a full GPU it was not tried."""
    own, mixed = configuration(precision="checkpoint"), configuration(precision="bf16-mixed")
    for dtype, order in (("float32", [mixed, own]), ("bfloat16", [own, mixed])):
        found = history(spec(), 5.0)
        known_dtype = found[0].measurement.model_copy(update={"configuration": own, "weights_dtype": dtype})
        view = View(known(spec(), facts(), (record(known_dtype, Origin.baseline), *found[1:])), "lora")
        grid = Grid(view.spec, "lora", view.choices, view.effectives, [own, mixed])
        saved = dict(zip((own.key, mixed.key), _saved(view, grid, own, mixed), strict=True))
        assert sorted((own, mixed), key=lambda one: -saved[one.key]) == order
        line = MemoryLine(rest_bytes=1e9, slope_bytes=1e9)
        guess = expected(own, [measured(mixed, memory_line=line)], 128, view.is_half())
        assert guess is not None and (guess.slope_bytes < 1e9) is (dtype == "bfloat16")


def _saved(view: View, grid: Grid, *asked: Configuration) -> list[float]:
    rows = np.array([grid.encode(one) for one in asked])
    return [float(one) for one in Feasibility(view, grid).saved(rows)]


def test_a_block_warms_up_all_of_a_unit_of_which_a_trial_timed_a_part(facts: Facts) -> None:
    part = timing(20.0).model_copy(update={"timed_share": 0.25})
    trial = measured(configuration(), 20.0, timing=part, time_spent={"warm-up": 4.0, "timing": 5.0})
    gpu = facts(device="cuda", has_own_memory=True)
    assert warm_seconds(trial, 20.0, gpu) == 16.0
    whole = trial.model_copy(update={"timing": timing(20.0)})
    assert warm_seconds(whole, 20.0, gpu) == 4.0


def test_idle_workers_are_shared_between_the_methods(spec: Spec, facts: Facts) -> None:
    """What is under way counts, or all of them would be given the method with the fewest ended trials."""
    job = spec(method=["lora", "full"], search={"trials": 30})
    records = [record(measured(configuration(method, micro=8), 10.0), Origin.baseline) for method in ("lora", "full")]
    decision = plan(known(job, facts(), tuple(records), workers=4))
    assert sorted(one.configuration.method for one in decision.trials) == ["full", "full", "lora", "lora"]


def test_downloads_are_no_part_of_the_search(spec: Spec, facts: Facts) -> None:
    job = spec(search={"minutes": 10, "trials": 100})
    first, *rest = history(spec(), 6.0, 5.0)
    downloads = first.measurement.model_copy(update={"time_spent": {PREPARE: 1000.0}})
    records = (first.model_copy(update={"measurement": downloads}), *rest)
    assert plan(known(job, facts(), records, elapsed_seconds=1100)).trials
    assert not plan(known(job, facts(), (first, *rest), elapsed_seconds=1100)).trials

"""Proposers are found in their folder, in a fixed order, and leave what they look at as it was."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.contract.states import Origin
from service.contract.task import PlanInput
from service.levers import LEVERS
from service.levers.base import Exclusion
from tests.factory import configuration, failed, history, measured, record, timing
from worker.plan import plan
from worker.plan.proposers import name_of, proposers
from worker.plan.proposers.improvement import ExpectedImprovement
from worker.plan.proposers.micro_batches import neighbours, pending
from worker.plan.proposers.search import ask
from worker.plan.view import View

Facts = Callable[..., HardwareFacts]
Spec = Callable[..., JobSpec]


def test_proposers_are_asked_in_their_order_the_baseline_first() -> None:
    found = proposers()
    names = ["Baseline", "Again", "ExpectedImprovement", "MicroBatches", "Ablation", "Search", "Repeat"]
    assert [name_of(one) for one in found if name_of(one) in names] == names
    assert {name_of(one) for one in found if one.always} >= {"Baseline", "Again"} and name_of(found[0]) == "Baseline"
    assert found == sorted(found, key=lambda one: (one.order, name_of(one))), "of equal orders by name"


def test_a_proposer_is_pure(spec: Spec, facts: Facts) -> None:
    known = PlanInput(spec=spec(search={"trials": 50}), facts=facts(), history=history(spec(), 6.0, 5.0), next_number=4)
    view = View(known, "lora")
    for proposer in proposers():
        before = deepcopy({name: value for name, value in vars(view).items() if name != "budget"})
        first = proposer.propose(view)
        assert proposer.propose(view) == first == proposer.propose(View(known, "lora"))
        assert before == {name: value for name, value in vars(view).items() if name != "budget"}


@pytest.mark.parametrize(
    ("batching", "micro", "predicted", "limit", "sizes"),
    [
        ("grouped", 4, 12, None, [8, 2]),
        ("grouped", 4, 7, None, [6, 2]),
        ("grouped", 4, 5, None, [2]),
        ("grouped", 1, 100, None, [2]),
        ("grouped", 24, 100, None, [12]),
        ("grouped", 4, 12, 6, [6, 2]),
        ("token-budget", 5, 100, None, [10, 3]),
        ("padding-free", 8, 9, None, [4]),
    ],
)
def test_the_best_is_tried_at_the_micro_batches_next_to_its_own(
    batching: str, micro: int, predicted: int, limit: int | None, sizes: list[int]
) -> None:
    best = measured(configuration(effective=24, batching=batching), micro_batch_size=micro)
    assert neighbours(best.model_copy(update={"predicted_micro_batch": predicted}), limit) == sizes


def test_sizes_come_with_the_last_trials_and_not_where_they_were_timed(spec: Spec, facts: Facts) -> None:
    baseline = record(measured(configuration(micro=8), 20.0), Origin.baseline)
    best = measured(configuration(batching="grouped"), 5.0, predicted_micro_batch=16)

    def proposed(trials: int, measurement: Measurement) -> tuple[list[int | None], bool]:
        """(the sizes to try, whether the surrogate leaves this trial to them)."""
        known = PlanInput(
            spec=spec(search={"trials": trials}),
            facts=facts(),
            history=(baseline, record(measurement)),
            next_number=3,
        )
        view = View(known, "lora")
        return [one.micro_batch_size for one in pending(view)], ExpectedImprovement().propose(view) is None

    assert proposed(4, best) == ([16, 4], True) and proposed(30, best) == ([16, 4], False)
    timed = best.model_copy(update={"curve": (timing(6.0, micro=16), timing(7.0, micro=4))})
    assert proposed(4, timed) == ([], False)


@pytest.mark.parametrize(
    ("weights", "fixed", "there"),
    [("bfloat16", {}, True), ("float16", {}, True), ("float32", {}, False), ("bfloat16", {"precision": "fp32"}, False)],
)
def test_the_checkpoints_own_precision_is_searched_where_it_is_another(
    spec: Spec, facts: Facts, weights: str, fixed: dict[str, str], there: bool
) -> None:
    """Where a checkpoint has 16 bits, its own format is what the user trains in now, and no other precision is that."""
    first = record(measured(configuration(micro=8), 10.0, weights_dtype=weights), Origin.baseline)
    known = PlanInput(spec=spec(search={"fixed": fixed}), facts=facts(), history=(first,), next_number=2)
    assert ("checkpoint" in View(known, "lora").choices["precision"]) is there
    assert "checkpoint" not in View(known.model_copy(update={"history": ()}), "lora").choices["precision"]


def test_a_precision_that_the_model_lacks_stays_left_out_of_half_a_checkpoints_too(spec: Spec, facts: Facts) -> None:
    first = record(measured(configuration(micro=8), 10.0, weights_dtype="bfloat16"), Origin.baseline)
    refused = failed(configuration(precision="fp32"), Outcome.invalid, "no").model_copy(
        update={"lacks": {"precision=fp32": "it has none"}}
    )
    known = PlanInput(spec=spec(), facts=facts(), history=(first, record(refused, number=2)), next_number=3)
    assert View(known, "lora").choices["precision"] == ("checkpoint",)


def test_a_fixed_choice_that_does_nothing_on_the_model_is_searched_with(spec: Spec, facts: Facts) -> None:
    """A vocabulary that is a multiple already: each trial has what was fixed, and none is refused for that."""
    job = spec(search={"trials": 6, "fixed": {"vocabulary": "multiple-8"}})
    lacks = {"vocabulary=multiple-8": "it is a multiple of 8 already", "vocabulary=multiple-64": "and of 64"}
    records = [record(measured(configuration(), 10.0, lacks=lacks), Origin.baseline)]
    known = PlanInput(spec=job, facts=facts(), history=tuple(records), next_number=2)
    (request,) = plan(known).trials
    assert request.configuration.levers["vocabulary"] == "multiple-8"


def test_where_memory_is_short_only_what_needs_little_is_drawn(spec: Spec, facts: Facts) -> None:
    """An optimizer with two numbers a weight is no news where one without any did not fit."""
    job = spec(method="full", search={"trials": 50, "quality": "allow"})
    small = configuration(optimizer="adafactor", checkpointing="full", head="chunked").model_copy(
        update={"method": "full"}
    )
    known = PlanInput(spec=job, facts=facts(), history=(record(failed(small)),), next_number=2)
    view = View(known, "full")
    drawn, taken = [], set(view.taken)
    for _ in range(12):
        one = ask(view, taken)
        assert one is not None
        taken.add(one.key)
        drawn.append(one.levers)
    assert {one["optimizer"] for one in drawn} <= {"adafactor", "sgd", "paged-adamw-8bit", "paged-adamw-32bit"}
    assert {one["checkpointing"] for one in drawn} == {"full"} and {one["head"] for one in drawn} == {"chunked"}
    assert len({one["batching"] for one in drawn}) > 1, "what has nothing to do with memory is free"
    crashed = known.model_copy(update={"history": (record(failed(small, Outcome.crashed)),)})
    view, others = View(crashed, "full"), []
    for _ in range(6):
        assert (one := ask(view, taken)) is not None
        taken.add(one.key)
        others.append(one.levers["checkpointing"])
    assert set(others) != {"full"}, "memory was not short"


def test_lean_choices_that_exclude_each_other_leave_something_to_draw(
    spec: Spec, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept alone, two levers' leanest choices left no draw valid, and the job ended as if everything had been tried."""
    lever = LEVERS["checkpointing"]
    rule = Exclusion({"checkpointing": ("full",), "head": ("chunked",)}, "made up for this test", "nowhere")
    changed = replace(lever, exclusions=(*lever.exclusions, rule))
    monkeypatch.setitem(LEVERS, "checkpointing", changed)
    for levers in (None, ["checkpointing", "head"]):  # with few levers all combinations are listed
        job = spec(method="full", search={"trials": 50, "quality": "allow", "levers": levers})
        small = configuration(checkpointing="full").model_copy(update={"method": "full"})
        known = PlanInput(spec=job, facts=facts(), history=(record(failed(small)),), next_number=2)
        view = View(known, "full")
        found = ask(view, set(view.taken))
        assert found is not None
        assert (found.levers["checkpointing"], found.levers["head"]) != ("full", "chunked")


def test_a_trial_begins_with_the_micro_batch_that_was_fastest_for_its_batching(spec: Spec, facts: Facts) -> None:
    """Or a size that happened to be timed once would make all levers that were tried with it look fast."""
    sizes = {"sorted": (6.0, 4), "grouped": (5.0, 8)}
    made = {
        name: measured(configuration(batching=name), seconds).model_copy(update={"micro_batch_size": micro})
        for name, (seconds, micro) in sizes.items()
    }
    slower = measured(configuration(batching="grouped", optimizer="adamw-loop"), 7.0)
    records = (*history(spec()), *map(record, (*made.values(), slower.model_copy(update={"micro_batch_size": 2}))))
    view = View(PlanInput(spec=spec(), facts=facts(), history=records, next_number=len(records) + 1), "lora")

    def told(batching: str, **more: Any) -> int | None:
        asked = configuration(batching=batching, padding="multiple-8", **more)
        return view.request(asked, Origin.search).first_micro_batch

    assert (told("sorted"), told("grouped"), told("packed"), told("padded")) == (4, 8, None, None)
    assert told("grouped", effective=64) is None

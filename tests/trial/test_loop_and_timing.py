"""The training step (normalisation, reference, worst case) and its clock (clean timings, interval, the unit)."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from service.levers import LEVERS
from tests.trial import tiny
from worker.devices.cpu import Cpu
from worker.trial import loop, timing
from worker.trial.arrange import Step
from worker.trial.build import Bundle
from worker.trial.curve import plan_of
from worker.trial.probe import full_step
from worker.trial.problem import Unstable
from worker.trial.timing import Pieces, Unit, interval, time_unit
from worker.trial.worst import worst_case

SAMPLES = list(range(16))


class Neighboured(Cpu):
    """The CPU, with a neighbour that the test decides on: the n-th window's share is the n-th of `shares`."""

    def __init__(self, shares: Any) -> None:
        super().__init__()
        self.shares = iter(shares)

    def others_share(self, first: Any, last: Any) -> float:
        """As told."""
        assert last[0] >= first[0]
        return next(self.shares)


@pytest.fixture
def made(llama: Path, functions: Path) -> Callable[..., Bundle]:
    """Makes bundles of the tiny Llama."""
    spec = tiny.job(llama, functions)
    return lambda method="full", device=None, **levers: tiny.bundle(spec, method, device, **levers)


def step_gradients(bundle: Bundle, step: Step) -> tuple[float, dict[str, torch.Tensor]]:
    """The step's loss and gradients, nothing updated."""
    batches, items = loop.prepare(bundle, step)
    count = torch.tensor(items)
    loss = sum(float(loop.forward_backward(bundle, batch, count)) for batch in batches)
    return loss, tiny.gradients(bundle.model)


# The step


def test_every_arrangement_of_a_step_learns_the_same(made: Callable[..., Bundle]) -> None:
    """Accumulated ragged micro batches against one batch of all samples."""
    bundle = made(batching="padded")
    (whole,) = plan_of(bundle, SAMPLES, micro=16, effective=16)
    expected_loss, expected = step_gradients(bundle, whole)
    within = [choice.name for choice in LEVERS["batching"].choices if not choice.changes_order]
    within.remove("padding-free")  # with the kernel that it needs: tests/levers/test_families.py
    assert set(within) == {"padded", "sorted", "packed", "token-budget"}
    for batching, micro in itertools.product(within, (1, 2, 4)):
        bundle.configuration.levers["batching"] = batching
        (step,) = plan_of(bundle, SAMPLES, micro, effective=16)
        assert len(step) > 1 or batching == "token-budget"
        loss, found = step_gradients(bundle, step)
        assert loss == pytest.approx(expected_loss, abs=1e-5), (batching, micro)
        assert tiny.furthest(found, expected) < 1e-5, (batching, micro)


def test_the_mean_of_micro_batch_means_would_be_seen(made: Callable[..., Bundle]) -> None:
    """The companion: normalising each micro batch by itself, as is often done, is outside what the test allows."""
    bundle = made()
    (step,) = plan_of(bundle, SAMPLES, micro=2, effective=16)
    _, expected = step_gradients(bundle, step)
    batches, _ = loop.prepare(bundle, step)
    for batch in batches:
        loop.forward_backward(bundle, batch, (batch["labels"] != -100).sum() * len(batches))
    assert tiny.furthest(tiny.gradients(bundle.model), expected) > 1e-4


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_a_classifier_s_step_is_normalised_over_its_samples(bert: Path, reviews: Path, micro: int) -> None:
    spec = tiny.job(bert, reviews, task="sequence-classification")
    bundle = tiny.bundle(spec, "full", batching="sorted")
    with loop.without_dropout(bundle.model) as was_on:
        assert was_on
        (whole,) = plan_of(bundle, SAMPLES, micro=16, effective=16)
        (step,) = plan_of(bundle, SAMPLES, micro, effective=16)
        expected_loss, expected = step_gradients(bundle, whole)
        loss, found = step_gradients(bundle, step)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert tiny.furthest(found, expected) < 1e-5


def test_without_dropout_puts_it_back(bert: Path, reviews: Path) -> None:
    bundle = tiny.bundle(tiny.job(bert, reviews, task="sequence-classification"), "full")
    (step,) = plan_of(bundle, SAMPLES, micro=16, effective=16)
    first, second = step_gradients(bundle, step)[0], step_gradients(bundle, step)[0]
    assert first != second, "dropout is on"
    one, other = loop.reference_step(bundle, step), loop.reference_step(bundle, step)
    assert one == other, "dropout is off"
    assert step_gradients(bundle, step)[0] != step_gradients(bundle, step)[0], "dropout is on again"


def test_the_reference_step_leaves_everything_as_it_is(made: Callable[..., Bundle]) -> None:
    bundle = made("lora")
    before = {name: value.clone() for name, value in bundle.model.state_dict().items()}
    (step,) = plan_of(bundle, SAMPLES, micro=4, effective=16)
    result = loop.reference_step(bundle, step)
    assert result.grad_norm > 0 and result == loop.reference_step(bundle, step)
    assert all(torch.equal(value, before[name]) for name, value in bundle.model.state_dict().items())
    assert all(parameter.grad is None for parameter in bundle.model.parameters())
    assert not bundle.optimizer.state


def test_a_step_updates_as_the_gradients_say_and_clips(made: Callable[..., Bundle]) -> None:
    bundle = made()
    (step,) = plan_of(bundle, SAMPLES, micro=4, effective=16)
    reference = loop.reference_step(bundle, step)
    bundle.optimizer = torch.optim.SGD(bundle.model.parameters(), lr=1.0)
    before = [value.detach().clone() for value in bundle.model.parameters()]
    loss, norm = loop.optimizer_step(bundle, *loop.prepare(bundle, step))
    assert (float(loss), float(norm)) == pytest.approx((reference.loss, reference.grad_norm), rel=1e-5)
    moved = torch.stack([(a - b).norm() for a, b in zip(bundle.model.parameters(), before, strict=True)]).norm()
    expected = min(float(norm), bundle.spec.training.max_grad_norm)
    assert float(moved.detach()) == pytest.approx(expected, rel=1e-3), "a step of the clipped gradient"


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (loop.StepResult(float("nan"), 1.0), "loss of step 3"),
        (loop.StepResult(float("inf"), 1.0), "loss of step 3"),
        (loop.StepResult(1.0, float("nan")), "gradient norm of step 3"),
        (loop.StepResult(1.0, float("inf")), "gradient norm of step 3"),
        (loop.StepResult(1.0, 0.0), "zero"),
    ],
)
def test_numbers_that_went_wrong(made: Callable[..., Bundle], result: loop.StepResult, says: str) -> None:
    bundle = made()
    with pytest.raises(Unstable, match=says):
        loop.check(bundle, result, 3)
    loop.check(bundle, loop.StepResult(1.0, 1e-9), 3)


def test_a_gradient_scaler_may_skip_some_steps_but_not_for_ever(made: Callable[..., Bundle]) -> None:
    bundle = made()
    bundle.scaler = torch.amp.GradScaler("cpu")
    overflow = loop.StepResult(1.0, float("inf"))
    for _ in range(2):  # a good step in between starts the count again
        for number in range(loop.MOST_SKIPPED):
            loop.check(bundle, overflow, number)
        loop.check(bundle, loop.StepResult(1.0, 1.0), 99)
    for number in range(loop.MOST_SKIPPED):
        loop.check(bundle, overflow, number)
    with pytest.raises(Unstable, match="gradient norm"):
        loop.check(bundle, overflow, 99)
    with pytest.raises(Unstable, match="loss"):
        loop.check(bundle, loop.StepResult(float("nan"), float("inf")), 0)


def test_nan_weights_end_the_unit(made: Callable[..., Bundle]) -> None:
    bundle = made()
    with torch.no_grad():
        bundle.model.model.norm.weight[0] = float("nan")
    with pytest.raises(Unstable, match="the loss of step 0 is nan"):
        Unit(bundle, 4, plan_of(bundle, SAMPLES, 4)).run()


def test_a_zero_gradient_ends_the_unit(made: Callable[..., Bundle]) -> None:
    bundle = made("lora")
    for name, parameter in bundle.model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.zeros_(parameter)  # with B at zero as well, nothing reaches either
    with pytest.raises(Unstable, match="zero"):
        Unit(bundle, 4, plan_of(bundle, SAMPLES, 4)).run()


# The worst case


def test_the_worst_case_of_padded_rows_is_the_longest_sample_everywhere(made: Callable[..., Bundle]) -> None:
    bundle = made(batching="sorted")
    batch, items = worst_case(bundle, 3)
    assert batch["input_ids"].shape == (3, max(bundle.data.lengths))
    assert items == int((batch["labels"] != -100).sum())


def test_the_worst_case_of_packed_rows_is_full_and_has_two_samples_a_row(made: Callable[..., Bundle]) -> None:
    bundle = made(batching="packed")
    batch, items = worst_case(bundle, 3)
    length = bundle.spec.dataset.max_length
    assert batch["input_ids"].shape == batch["position_ids"].shape == (3, length)
    assert [int((row == 0).sum()) for row in batch["position_ids"]] == [2, 2, 2]
    assert items == int((batch["labels"] != -100).sum()) > 0


@pytest.mark.parametrize("batching", LEVERS["batching"].names)
def test_nothing_the_data_can_make_is_larger_than_the_worst_case(made: Callable[..., Bundle], batching: str) -> None:
    bundle = made(batching=batching)
    order = list(range(len(bundle.data.lengths)))
    most, _ = worst_case(bundle, 4)
    for step in plan_of(bundle, order, micro=4):
        for batch in loop.prepare(bundle, step)[0]:
            assert batch["input_ids"].numel() <= most["input_ids"].numel()
            assert batch["input_ids"].shape[1] <= most["input_ids"].shape[1]
            # Where all rows are as long, transformers drops the mask, and with it the memory that a mask takes.
            masks = "attention_mask" in batch and not batch["attention_mask"].all()
            assert not masks or not most["attention_mask"].all()


def test_a_worst_case_step_at_rate_zero_leaves_the_weights(made: Callable[..., Bundle]) -> None:
    bundle = made()
    before = loop.trained_sum(bundle.model)
    bundle.optimizer.param_groups[0]["lr"] = bundle.optimizer.param_groups[1]["lr"] = 0.0
    full_step(bundle, 2)
    assert loop.trained_sum(bundle.model) == before and bundle.optimizer.state


# The clock


def test_clean_timings_replace_the_others_and_are_counted() -> None:
    pieces = Pieces()
    pieces.add((0, 0), 9.0, 0.5)
    assert pieces.best() == {(0, 0): [9.0]} and pieces.clean_share() == 0 and pieces.short(1, 1)
    pieces.add((0, 0), 2.0, timing.MOST_OTHERS)
    assert pieces.best() == {(0, 0): [2.0]} and pieces.clean_share() == 0.5 and not pieces.short(1, 1)
    pieces.add((0, 1), 7.0, timing.MOST_OTHERS + 0.001)
    assert pieces.best() == {(0, 0): [2.0], (0, 1): [7.0]} and pieces.worst_share == 0.5
    assert pieces.short(2, 1), "the second piece has no clean timing"
    pieces.add((0, 1), 3.0, 0.0)
    assert not pieces.short(2, 1) and pieces.short(2, 2) and pieces.short(3, 1)


def test_the_interval_brackets_the_sum_of_medians_and_shrinks_with_more_timings() -> None:
    rng = random.Random(0)

    def noisy(count: int) -> dict[tuple[int, int], list[float]]:
        return {(0, at): [(1 + at) * rng.gauss(1, 0.05) for _ in range(count)] for at in range(12)}

    few, many = noisy(3), noisy(30)
    for pieces in (few, many):
        total, low, high = interval(pieces)
        assert total == pytest.approx(sum(map(statistics.median, pieces.values())))
        assert low <= total <= high and low < high
        assert interval(pieces) == (total, low, high), "the same every time"
    assert interval(many)[2] - interval(many)[1] < 0.6 * (interval(few)[2] - interval(few)[1])


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(60):
        pieces = {(0, at): [rng.gauss(1, 0.05) for _ in range(5)] for at in range(8)}
        _, low, high = interval(pieces)
        held += low <= 8.0 <= high
    assert held >= 48, f"the true sum lay inside {held} of 60"


def test_single_timings_take_their_spread_from_the_shapes() -> None:
    once = {(0, at): [1.0] for at in range(8)}
    assert interval(once) == (8.0, 8.0, 8.0)
    total, low, high = interval(once, [-0.2, -0.1, 0.1, 0.2])
    assert low < total == 8.0 < high


def test_the_unit_trains_and_reports_its_shapes(made: Callable[..., Bundle]) -> None:
    bundle = made(device=Neighboured(itertools.repeat(0.0)))
    before = loop.trained_sum(bundle.model)
    plan = plan_of(bundle, SAMPLES, 4)
    unit = Unit(bundle, 4, plan)
    assert unit.run() and unit.run()
    assert loop.trained_sum(bundle.model) != before
    assert len(unit.losses) == len(unit.grad_norms) == 4 and unit.losses[2] < unit.losses[0], "it learns"
    lengths = [bundle.data.lengths[sample] for sample in SAMPLES]
    seen = unit.timing()
    assert (seen.samples, seen.steps, seen.passes, seen.tokens) == (16, 2, 2, sum(lengths))
    assert seen.padded_tokens == sum(4 * max(lengths[at : at + 4]) for at in range(0, 16, 4)) >= seen.tokens
    assert 0 < seen.low <= seen.seconds <= seen.high and seen.clean_share == 1
    assert unit.piece_count() == 6 == len(unit.pieces.clean)
    assert {len(times) for times in unit.pieces.clean.values()} == {2}


def test_a_deadline_that_has_passed_runs_nothing(made: Callable[..., Bundle]) -> None:
    bundle = made()
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    assert not unit.run(deadline=0.0) and not unit.losses and unit.passes == 0


def test_steps_beside_a_busy_neighbour_are_not_counted(made: Callable[..., Bundle]) -> None:
    """Two steps a pass, a window each: the first step's first two timings had a neighbour."""
    bundle = made(device=Neighboured([0.5, 0.0, 0.5, 0.05, 0.0, 0.0]))
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    unit.run()
    assert {piece[0] for piece in unit.pieces.clean} == {1} and {piece[0] for piece in unit.pieces.dirty} == {0}
    unit.run()
    assert unit.timing().clean_share == 0.5 and unit.timing().largest_share_of_others == 0.5
    unit.run()
    best = unit.pieces.best()
    assert {len(times) for piece, times in best.items() if piece[0] == 0} == {1}
    assert {len(times) for piece, times in best.items() if piece[0] == 1} == {3}


def test_a_unit_short_of_clean_timings_is_run_again_but_not_for_ever(made: Callable[..., Bundle]) -> None:
    bundle = made(device=Neighboured([0.5, 0.0, 0.0, 0.0]))
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    time_unit(unit, passes=1, extra=3)
    assert unit.passes == 2, "the second pass made the first step's timings clean"
    bundle = made(device=Neighboured(itertools.repeat(0.9)))
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    time_unit(unit, passes=1, extra=2)
    assert unit.passes == 3 and unit.timing().clean_share == 0


def test_long_steps_are_read_in_windows(made: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window for each piece, one busy window costs one piece and not the step."""
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.0)
    bundle = made(device=Neighboured([0.0, 0.5, 0.0, 0.0, 0.0, 0.0]))
    unit = Unit(bundle, 4, plan_of(bundle, SAMPLES, 4))
    unit.run()
    assert list(unit.pieces.dirty) == [(0, 1)]
    assert sorted(unit.pieces.clean) == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes:UserWarning")  # on 2 cores
@pytest.mark.parametrize("loading", LEVERS["loading"].names)
def test_batches_are_the_same_wherever_they_are_made(made: Callable[..., Bundle], loading: str) -> None:
    bundle = made(batching="sorted", loading=loading)
    plan = plan_of(bundle, list(range(12)), micro=2, effective=4)
    expected = [loop.prepare(bundle, step) for step in plan]
    with contextlib.closing(loop.loaded(bundle, plan)) as steps:
        found = list(steps)
    assert [items for _, items, _ in found] == [items for _, items in expected]
    lengths = bundle.data.lengths
    assert [tokens for *_, tokens in found] == [sum(lengths[4 * at : 4 * at + 4]) for at in range(3)]
    for (ours, *_), (theirs, _) in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)
    assert not active_children(), "a pass over, its workers have gone"


def test_what_the_device_waits_for_data_is_counted(
    made: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of our own: making a step's batches takes a second, each of its three pieces half a one."""
    bundle = made()
    clock = [0.0]
    prepare = loop.prepare

    def slowly(*args: Any) -> Any:
        clock[0] += 1.0
        return prepare(*args)

    monkeypatch.setattr(loop, "prepare", slowly)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    marks = itertools.count()

    def mark() -> float:
        clock[0] += 0.5 * (next(marks) % 4 > 0)  # the first of a step's four begins it
        return clock[0]

    monkeypatch.setattr(bundle.device, "mark", mark)
    unit = Unit(bundle, 2, plan_of(bundle, list(range(12)), micro=2, effective=4))
    assert unit.run()
    seen = unit.timing()
    assert (seen.waiting_seconds, seen.seconds) == (3.0, 7.5), "three steps, a wait and three pieces each"

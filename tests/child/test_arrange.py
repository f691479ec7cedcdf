"""Properties of the arrangements, over random lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from service.levers import LEVERS
from service.levers.batching import BUDGETED, PACKED
from tests.child import tiny
from tests.factory import configuration
from training.batches import arranged, epoch_steps
from training.levers.batching import pack, packed_globally
from training.samples import Step
from worker.child import arrange
from worker.child.build import recipe_of

SEEDS = range(25)
BATCHINGS = LEVERS["batching"].names
WITHIN_A_STEP = tuple(choice.name for choice in LEVERS["batching"].choices if not choice.changes_order)
ROW_LENGTH = 128


@dataclass(frozen=True)
class Case:
    """Random samples: their order, lengths, effective batch and micro batch."""

    order: list[int]
    lengths: list[int]
    effective: int
    micro: int

    def plan(self, batching: str, seed: int = 0) -> list[Step]:
        """Arranged."""
        spec = tiny.job(Path("model"), Path("data.jsonl"), ROW_LENGTH, search={"verify": "standard"})
        recipe = recipe_of(spec, configuration("lora", self.effective, batching=batching))
        return arranged(self.order, self.lengths, seed, replace(recipe, micro_batch_size=self.micro))


def case(seed: int, micro: int | None = None) -> Case:
    """A case; in about half of them the effective batch does not divide the samples."""
    rng = random.Random(seed)
    lengths = [min(ROW_LENGTH, max(1, int(rng.lognormvariate(3, 1)))) for _ in range(rng.randint(1, 300))]
    order = rng.sample(range(len(lengths)), rng.randint(1, len(lengths)))
    effective = rng.choice((1, 2, 6, 8, 16, 32))
    return Case(order, lengths, effective, micro or rng.randint(1, effective))


def flat(step: Step) -> list[int]:
    """The samples of a step."""
    return [sample for micro in step for row in micro for sample in row]


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_once_and_no_empty_part(batching: str, seed: int) -> None:
    made = case(seed)
    plan = made.plan(batching)
    assert sorted(sample for step in plan for sample in flat(step)) == sorted(made.order)
    assert all(step and all(micro and all(micro) for micro in step) for step in plan)


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_micro_batch_has_more_rows_and_no_row_more_tokens_than_allowed(batching: str, seed: int) -> None:
    made = case(seed)
    micros = [micro for step in made.plan(batching) for micro in step]
    rows = [row for micro in micros for row in micro]
    longest = max(sum(made.lengths[sample] for sample in row) for row in rows)
    if batching in BUDGETED:
        budget = made.micro * max(made.lengths)
        shapes = [arrange.padded_shape(micro, made.lengths) for micro in micros]
        assert max(count * width for count, width in shapes) <= budget
    else:
        assert max(len(micro) for micro in micros) <= made.micro and longest <= ROW_LENGTH
    if batching not in PACKED:
        assert {len(row) for row in rows} == {1}


@pytest.mark.parametrize("batching", WITHIN_A_STEP)
@pytest.mark.parametrize("seed", SEEDS)
def test_steps_hold_the_samples_that_plain_padding_has(batching: str, seed: int) -> None:
    made = case(seed)
    expected = [
        sorted(made.order[start : start + made.effective]) for start in range(0, len(made.order), made.effective)
    ]
    assert [sorted(flat(step)) for step in made.plan(batching)] == expected


def test_the_catalogue_marks_exactly_what_changes_the_order() -> None:
    assert set(WITHIN_A_STEP) == {"padded", "sorted", "token-budget", "packed", "padding-free"}
    made = Case(list(range(64)), [1 + at % 60 for at in range(64)], 8, 4)
    padded = [sorted(flat(step)) for step in made.plan("padded")]
    assert [sorted(flat(step)) for step in made.plan("grouped")] != padded


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_steps_as_plain_padding(batching: str, seed: int) -> None:
    """Nothing is gained by taking fewer or larger steps, also where the micro batch does not divide them."""
    made = case(seed)
    assert len(made.plan(batching)) == -(-len(made.order) // made.effective)


@pytest.mark.parametrize("samples", [1, 2, 9, 63, 64, 65, 80, 128, 200])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_epoch_of_few_steps_has_as_many_when_packed_globally(samples: int, seed: int) -> None:
    """One step fewer of two would be half of what the user asked for, and the schedule goes by the first epoch's."""
    rng = random.Random(seed)
    made = Case(list(range(samples)), [rng.randint(3, 40) for _ in range(samples)], 64, 4)
    plan = made.plan("packed-global", seed)
    assert len(plan) == -(-samples // 64) and all(plan) and sorted(sum(map(flat, plan), [])) == made.order


@pytest.mark.parametrize("seed", SEEDS)
def test_grouped_keeps_the_effective_batch(seed: int) -> None:
    """Also where memory holds a micro batch of 3 and a step has 8 samples."""
    rng = random.Random(seed)
    effective = rng.choice((4, 8, 16, 24))
    count = effective * 8 * rng.randint(1, 3)
    lengths = [rng.randint(1, ROW_LENGTH) for _ in range(count)]
    made = Case(list(range(count)), lengths, effective, rng.randint(1, effective))
    assert {len(flat(step)) for step in made.plan("grouped", seed)} == {effective}


@pytest.mark.parametrize("seed", SEEDS)
def test_grouped_never_makes_a_step_larger_than_the_effective_batch(seed: int) -> None:
    made = case(seed)
    assert max(len(flat(step)) for step in made.plan("grouped", seed)) <= made.effective


@pytest.mark.parametrize(("effective", "micro", "rows"), [(12, 5, 4), (8, 3, 2), (8, 8, 8), (7, 6, 1)])
def test_grouped_takes_the_largest_micro_batch_that_a_step_is_made_of(effective: int, micro: int, rows: int) -> None:
    """Smaller ones would fit as well, and leave most of the device idle."""
    made = Case(list(range(4 * effective)), [5 + at % 50 for at in range(4 * effective)], effective, micro)
    assert {len(one) for step in made.plan("grouped") for one in step} == {rows}


@pytest.mark.parametrize("batching", ["grouped", "packed-global"])
def test_what_is_sorted_over_steps_is_shuffled_by_the_seed_and_only_by_it(batching: str) -> None:
    made = Case(list(range(128)), [1 + at % 100 for at in range(128)], 8, 4)
    assert made.plan(batching, 1) == made.plan(batching, 1)
    assert made.plan(batching, 1) != made.plan(batching, 2)
    first = [made.lengths[flat(step)[0]] for step in made.plan(batching, 1)]
    assert first != sorted(first, reverse=True), "long batches must not all come first"


def test_every_epoch_has_another_order_and_a_run_has_the_same_again() -> None:
    made = case(0, micro=2)
    spec = tiny.job(Path("model"), Path("rows.jsonl"))
    recipe = replace(recipe_of(spec, configuration("lora", made.effective)), micro_batch_size=2)
    epochs = [epoch_steps(made.lengths, epoch, recipe) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]


def padded(made: Case, batching: str) -> int:
    """Tokens that the device computes, padding included."""
    shapes = [arrange.padded_shape(micro, made.lengths) for step in made.plan(batching) for micro in step]
    return sum(rows * width for rows, width in shapes)


@pytest.mark.parametrize("seed", SEEDS)
def test_sorting_pads_no_more_than_the_random_order_and_grouping_no_more_than_sorting(seed: int) -> None:
    rng = random.Random(seed)
    count = 16 * 8
    made = Case(list(range(count)), [rng.randint(1, ROW_LENGTH) for _ in range(count)], 16, rng.choice((2, 4, 8)))
    useful = sum(made.lengths)
    assert useful <= padded(made, "grouped") <= padded(made, "sorted") <= padded(made, "padded")


@pytest.mark.parametrize("seed", SEEDS)
def test_best_fit_decreasing_opens_a_row_only_when_none_has_room(seed: int) -> None:
    made = case(seed)
    rows = pack(made.order, made.lengths, ROW_LENGTH, len(made.order))
    fills = [sum(made.lengths[sample] for sample in row) for row in rows]
    for at, row in enumerate(rows):
        assert all(fill + made.lengths[row[0]] > ROW_LENGTH for fill in fills[:at])
    fewest = -(-sum(fills) // ROW_LENGTH)
    assert fewest <= len(rows) <= 2 * fewest


@pytest.mark.parametrize("seed", SEEDS)
def test_best_fit_decreasing_is_the_textbook_one(seed: int) -> None:
    made = case(seed)
    expected: list[list[int]] = []
    for length in sorted((made.lengths[sample] for sample in made.order), reverse=True):
        fitting = [row for row in expected if sum(row) + length <= ROW_LENGTH]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            expected.append([length])
    rows = pack(made.order, made.lengths, ROW_LENGTH, len(made.order))
    assert sorted([made.lengths[sample] for sample in row] for row in rows) == sorted(expected)


def test_packing_takes_the_fullest_row_that_has_room() -> None:
    lengths = [60, 50, 30, 20, 10]
    # 60 | 50 open two rows of 90; 30 fits into the first exactly, 20 and 10 into the second only.
    assert pack(range(5), lengths, 90, 5) == [[0, 2], [1, 3, 4]]
    assert pack([4, 3, 2, 1, 0], lengths, 90, 5) == [[0, 2], [1, 3, 4]], "the order given does not matter"


def test_a_row_has_no_more_samples_than_a_step() -> None:
    assert pack(range(5), [60, 50, 30, 20, 10], 90, 2) == [[0, 2], [1, 3], [4]]


@pytest.mark.parametrize("seed", SEEDS)
def test_global_packing_fills_rows_at_least_as_well_and_its_steps_have_their_samples(seed: int) -> None:
    made = case(seed)
    plan = made.plan("packed-global", seed)
    sizes = [len(flat(step)) for step in plan]
    for at in range(1, len(sizes)):  # so many steps have so many equal shares of the samples, to half a step
        assert abs(sum(sizes[:at]) - at * len(made.order) / len(sizes)) <= made.effective / 2
    assert max(sizes) <= 2 * made.effective
    rows, within = (sum(len(micro) for step in one for micro in step) for one in (plan, made.plan("packed")))
    assert rows <= within
    assert plan == made.plan("packed-global", seed)


def test_no_step_is_left_without_a_row_however_many_samples_the_rows_before_it_hold() -> None:
    """Thirteen samples are three steps of six at most; two rows that hold nearly all of them would be taken for two."""
    lengths = [12, 3, 6, 3, 2, 3, 1, 7, 9, 1, 17, 11, 4]
    plan = packed_globally(range(13), lengths, effective=6, micro=4, row_length=64, seed=4)
    assert len(plan) == 3 and sorted(sum(map(flat, plan), [])) == list(range(13))


def test_a_token_budget_fills_the_memory_that_long_samples_need() -> None:
    made = Case(list(range(16)), [100] * 4 + [10] * 12, 16, 2)
    assert [len(micro) for step in made.plan("token-budget") for micro in step] == [2, 2, 12]


def test_a_row_of_many_samples_takes_the_tokens_of_a_micro_batch_of_the_longest() -> None:
    """Without padding each row is a micro batch, of any number of samples: memory goes by its tokens."""
    made = Case(list(range(16)), [100] * 4 + [10] * 12, 16, 2)
    assert [[len(row) for row in micro] for step in made.plan("padding-free") for micro in step] == [[2], [2], [12]]


def test_a_packed_row_has_as_many_samples_of_its_step_as_fit() -> None:
    """The micro batch counts rows, and says nothing of how many samples one of them holds."""
    made = Case(list(range(16)), [16] * 16, 8, 2)
    assert [[len(row) for row in micro] for step in made.plan("packed") for micro in step] == [[8], [8]]


def test_candidates_divide_the_effective_batch_and_respect_the_limit() -> None:
    assert arrange.micro_candidates("padded", 24, 100) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert arrange.micro_candidates("sorted", 24, 7) == [1, 2, 3, 4, 6]
    assert arrange.micro_candidates("grouped", 7, 6) == [1]
    assert arrange.micro_candidates("packed", 24, 9) == [1, 2, 4, 8]
    assert arrange.micro_candidates("token-budget", 24, 13) == [1, 2, 4, 8, 13]


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("limit", [1, 2, 5, 64])
@pytest.mark.parametrize("effective", [1, 5, 12, 64])
def test_candidates_ascend_and_begin_with_one(batching: str, limit: int, effective: int) -> None:
    found = arrange.micro_candidates(batching, effective, limit)
    assert found[0] == 1 and found == sorted(set(found)) and found[-1] <= limit


def test_accumulation_is_that_of_a_whole_step_or_the_most_common_count_of_rows() -> None:
    """Of 84 samples in steps of 64 the second has 20, which are fewer micro batches: a run of the user's has 64."""
    for batching in ("padded", "sorted", "grouped"):
        plan = Case(list(range(84)), [5] * 84, 64, 16).plan(batching)
        assert arrange.accumulation(batching, plan, 16, 64) == 4, batching
    one: Step = [[[0]]]
    two: Step = [[[1]], [[2]]]
    assert arrange.accumulation("packed", [one, two, two], 1, 8) == 2
    assert arrange.accumulation("token-budget", [two, one], 1, 8) == 1, "a tie goes to fewer"


def test_padded_shape_is_what_the_device_computes() -> None:
    lengths = [3, 7, 5, 1]
    assert arrange.padded_shape([[0], [1]], lengths) == (2, 7)
    assert arrange.padded_shape([[0, 2], [1], [3]], lengths) == (3, 8)

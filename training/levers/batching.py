"""Arranges samples in optimizer steps of micro batches of rows. Plain Python, the same for every device.

A plan is a list of steps; a step is a list of micro batches; a micro batch is a list of rows; a row is a list of
sample indices (one, unless packed). The functions that make a plan take the samples in `order` (the last step may be
short); `lengths[sample]` and `row_length` are tokens, `effective` is samples a step, `micro` is rows a micro batch.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

from training.samples import MicroBatch, Row, Step


def steps_of(order: Sequence[int], effective: int) -> list[list[int]]:
    """Cut `order` into the samples of each optimizer step."""
    return [list(order[start : start + effective]) for start in range(0, len(order), effective)]


def cut(rows: list[Row], micro: int) -> list[MicroBatch]:
    """Cut the rows into micro batches of `micro` rows."""
    return [rows[start : start + micro] for start in range(0, len(rows), micro)]


def longest_first(samples: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The samples by length, longest first; equally long samples by index."""
    return sorted(samples, key=lambda one: (-lengths[one], one))


def pack(samples: Sequence[int], lengths: Sequence[int], row_length: int, most: int) -> list[Row]:
    """Best-fit decreasing: longest sample first, each is put into the fullest row that still has room for it.

    A row has room up to `row_length` tokens and up to `most` samples.
    """
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # (tokens free, row), sorted
    for sample in longest_first(samples, lengths):
        place = bisect_left(room, (lengths[sample], -1))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = row_length, len(rows)
            rows.append([])
        rows[row].append(sample)
        if len(rows[row]) < most:
            insort(room, (free - lengths[sample], row))
    return rows


def padded(order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, **_: int) -> list[Step]:
    """Samples in the order given, one a row, padded to the longest of their micro batch."""
    return [cut([[one] for one in step], micro) for step in steps_of(order, effective)]


def sorted_within(order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, **_: int) -> list[Step]:
    """Each step's samples sorted by length, so that its micro batches need less padding."""
    return [cut([[one] for one in longest_first(step, lengths)], micro) for step in steps_of(order, effective)]


def token_budget(order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, **_: int) -> list[Step]:
    """Each step's samples by length, in micro batches of at most `micro` times the longest sample's tokens, padded."""
    budget = micro * max(lengths)
    plan: list[Step] = []
    for step in steps_of(order, effective):
        rows, batches = [[one] for one in longest_first(step, lengths)], []
        while rows:
            count = max(1, budget // max(1, lengths[rows[0][0]]))
            batches.append(rows[:count])
            rows = rows[count:]
        plan.append(batches)
    return plan


def packed_within(
    order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, row_length: int, **_: int
) -> list[Step]:
    """Each step's samples packed into rows of at most `row_length` tokens."""
    return [cut(pack(step, lengths, row_length, effective), micro) for step in steps_of(order, effective)]


def side_by_side(order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, **_: int) -> list[Step]:
    """Each step's samples in rows of at most the tokens of `micro` longest samples; each row is a micro batch."""
    budget = micro * max(lengths)
    return [cut(pack(step, lengths, budget, effective), 1) for step in steps_of(order, effective)]


def packed_globally(
    order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, row_length: int, seed: int, **_: int
) -> list[Step]:
    """All samples packed into rows, the rows shuffled and cut into as many steps as there would be without packing.

    A row has at most `effective` samples. A step ends where the number of samples so far is nearest to
    an equal share for each step so far, and early enough to leave each later step a row. A step may have up to twice
    as many samples as `effective`.
    """
    rows = pack(order, lengths, row_length, effective)
    random.Random(seed).shuffle(rows)
    steps, seen = -(-len(order) // effective), 0
    plan: list[list[Row]] = []
    for at, row in enumerate(rows):
        due = len(order) * len(plan) / steps
        if due - seen < seen + len(row) - due or len(rows) - at == steps - len(plan):
            plan.append([])
        plan[-1].append(row)
        seen += len(row)
    return [cut(step, micro) for step in plan]


def grouped(
    order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, seed: int, group_steps: int, **_: int
) -> list[Step]:
    """Samples of `group_steps` steps at a time, sorted, cut into micro batches, which are shuffled over the steps.

    A step is made of whole micro batches, so these have the largest size up to `micro` that divides `effective`.
    """
    micro = max(size for size in range(1, min(micro, effective) + 1) if effective % size == 0)
    rng, per_step, size = random.Random(seed), effective // micro, group_steps * effective
    plan: list[Step] = []
    for span in steps_of(order, size):
        rows = [[one] for one in longest_first(span, lengths)]
        batches = cut(rows, micro)
        rng.shuffle(batches)
        plan += [batches[at : at + per_step] for at in range(0, len(batches), per_step)]
    return plan

"""Samples -> optimizer steps of micro batches of rows. Plain Python, the same for every device.

A plan is a list of steps; a step is a list of micro batches; a micro batch is a list of rows; a row is a list of
sample indices (one, unless packed). All take the samples in `order` (the last step may be short); `lengths[sample]`
and `row_length` are tokens, `effective` is samples a step, `micro` is rows.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

from service.exports.templates.common import MicroBatch, Row, Step


def steps_of(order: Sequence[int], effective: int) -> list[list[int]]:
    """The samples of each optimizer step."""
    return [list(order[start : start + effective]) for start in range(0, len(order), effective)]


def cut(rows: list[Row], micro: int) -> list[MicroBatch]:
    """Rows in micro batches."""
    return [rows[start : start + micro] for start in range(0, len(rows), micro)]


def longest_first(samples: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The samples by length, equal ones by number."""
    return sorted(samples, key=lambda one: (-lengths[one], one))


def pack(samples: Sequence[int], lengths: Sequence[int], row_length: int) -> list[Row]:
    """Best-fit decreasing: the longest sample first, each into the fullest row that still has room for it."""
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
        insort(room, (free - lengths[sample], row))
    return rows


def padded(order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, **_: int) -> list[Step]:
    """In the order given."""
    return [cut([[one] for one in step], micro) for step in steps_of(order, effective)]


def sorted_within(order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, **_: int) -> list[Step]:
    """Each step's samples sorted by length: the same step with less padding."""
    return [cut([[one] for one in longest_first(step, lengths)], micro) for step in steps_of(order, effective)]


def token_budget(order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, **_: int) -> list[Step]:
    """Each step's samples sorted by length, as many a micro batch as `micro` of the longest have padded tokens."""
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
    """Each step's samples packed into rows."""
    return [cut(pack(step, lengths, row_length), micro) for step in steps_of(order, effective)]


def side_by_side(order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, **_: int) -> list[Step]:
    """Each step's samples in rows of as many tokens as `micro` of the longest have, a row a micro batch."""
    budget = micro * max(lengths)
    return [cut(pack(step, lengths, budget), 1) for step in steps_of(order, effective)]


def packed_globally(
    order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, row_length: int, seed: int, **_: int
) -> list[Step]:
    """All samples packed into rows, the rows shuffled, and dealt out until a step has its samples."""
    rows = pack(order, lengths, row_length)
    random.Random(seed).shuffle(rows)
    plan: list[Step] = []
    step: list[Row] = []
    for row in rows:
        step.append(row)
        if sum(map(len, step)) >= effective:
            plan.append(cut(step, micro))
            step = []
    return [*plan, cut(step, micro)] if step else plan


def grouped(
    order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, seed: int, group_steps: int, **_: int
) -> list[Step]:
    """Sorted over a span of `group_steps` steps, cut, shuffled, and dealt out again, `effective` samples a step."""
    rng, per_step = random.Random(seed), max(1, effective // micro)
    plan: list[Step] = []
    for span in steps_of(order, group_steps * effective):
        batches = cut([[one] for one in longest_first(span, lengths)], micro)
        rng.shuffle(batches)
        plan += [batches[at : at + per_step] for at in range(0, len(batches), per_step)]
    return plan

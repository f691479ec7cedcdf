"""Arranges samples into optimizer steps, micro batches and rows. Plain Python, the same for every device.

A plan is a list of steps; a step is a list of micro batches; a micro batch is a list of rows; a row is a list of
sample indices (one, unless packed). Every arrangement but `grouped` keeps the samples of a step, so all of them
learn the same with the loss normalised over the step.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

Row = list[int]
MicroBatch = list[Row]
Step = list[MicroBatch]


def pack(samples: Sequence[int], lengths: Sequence[int], row_length: int) -> list[Row]:
    """Best-fit decreasing: the longest sample first, each into the fullest row that still has room for it."""
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # (tokens free, row), sorted
    for sample in sorted(samples, key=lambda one: (-lengths[one], one)):
        place = bisect_left(room, (lengths[sample], -1))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = row_length, len(rows)
            rows.append([])
        rows[row].append(sample)
        insort(room, (free - lengths[sample], row))
    return rows


def _cut(rows: list[Row], micro: int) -> list[MicroBatch]:
    return [rows[start : start + micro] for start in range(0, len(rows), micro)]


def _by_length(samples: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(samples, key=lambda one: (-lengths[one], one))


def arrange(
    batching: str,
    order: Sequence[int],
    lengths: Sequence[int],
    effective: int,
    micro: int,
    row_length: int,
    seed: int = 0,
    group_steps: int = 8,
) -> list[Step]:
    """The plan for samples in `order` (the last step may be short). ValueError for an unknown batching.

    `lengths[sample]` and `row_length` are tokens; `effective` is samples a step; `micro` is samples, or rows
    when packed; `group_steps` is how many steps `grouped` sorts over.
    """
    steps = [list(order[start : start + effective]) for start in range(0, len(order), effective)]
    if batching == "padded":
        return [_cut([[one] for one in step], micro) for step in steps]
    if batching == "sorted":
        return [_cut([[one] for one in _by_length(step, lengths)], micro) for step in steps]
    if batching == "packed":
        return [_cut(pack(step, lengths, row_length), micro) for step in steps]
    if batching == "grouped":
        return _grouped(order, lengths, effective, micro, group_steps, random.Random(seed))
    raise ValueError(f"there is no batching {batching!r}")


def _grouped(
    order: Sequence[int], lengths: Sequence[int], effective: int, micro: int, steps: int, rng: random.Random
) -> list[Step]:
    """Sorted over a span of `steps` steps, cut, shuffled, and dealt out again, `effective` samples a step."""
    plan: list[Step] = []
    span = steps * effective
    per_step = max(1, effective // micro)
    for start in range(0, len(order), span):
        batches = _cut([[one] for one in _by_length(order[start : start + span], lengths)], micro)
        rng.shuffle(batches)
        plan += [batches[at : at + per_step] for at in range(0, len(batches), per_step)]
    return plan


def micro_candidates(batching: str, effective: int, limit: int) -> list[int]:
    """Micro batches worth timing, ascending: divisors of the effective batch, or for packed rows powers of two."""
    if batching == "packed":
        return [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= limit] or [1]
    return [size for size in range(1, min(effective, limit) + 1) if effective % size == 0]


def accumulation(plan: Sequence[Step]) -> int:
    """Micro batches a step: the most common count."""
    counts = [len(step) for step in plan]
    return max(sorted(set(counts)), key=counts.count)


def padded_tokens(batch: MicroBatch, lengths: Sequence[int]) -> tuple[int, int]:
    """(rows, tokens of the longest row) of a micro batch: the shape the device computes."""
    return len(batch), max(sum(lengths[one] for one in row) for row in batch)

"""Arranges samples into optimizer steps, micro batches and rows, as the batching lever says.

The functions themselves lie with the levers: service/exports/templates/levers/batching.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.exports.templates.common import MicroBatch, Row, Step
from service.exports.templates.levers.batching import pack
from service.levers import LEVERS
from service.levers.batching import BUDGETED, PACKED
from worker.levers import function


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

    `lengths[sample]` and `row_length` are tokens; `effective` is samples a step; `micro` is samples, rows when packed,
    or rows of the longest sample under a token budget; `group_steps` is how many steps `grouped` sorts over.
    """
    if batching not in LEVERS["batching"].names:
        raise ValueError(f"there is no batching {batching!r}")
    steps: list[Step] = function("batching", LEVERS["batching"].choice(batching))(
        order, lengths, effective, micro, row_length=row_length, seed=seed, group_steps=group_steps
    )
    return steps


def micro_candidates(batching: str, effective: int, limit: int) -> list[int]:
    """Micro batches worth timing, ascending: divisors of the effective batch; powers of two for packed rows.

    A token budget may be any: powers of two and the limit.
    """
    if batching in BUDGETED:
        most = min(effective, limit)
        return sorted({most, *(2**power for power in range(10) if 2**power <= most)})
    if batching in PACKED:
        return [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= limit] or [1]
    return [size for size in range(1, min(effective, limit) + 1) if effective % size == 0]


def accumulation(plan: Sequence[Step]) -> int:
    """Micro batches a step: the most common count."""
    counts = [len(step) for step in plan]
    return max(sorted(set(counts)), key=counts.count)


def padded_tokens(batch: MicroBatch, lengths: Sequence[int]) -> tuple[int, int]:
    """(rows, tokens of the longest row) of a micro batch: the shape the device computes."""
    return len(batch), max(sum(lengths[one] for one in row) for row in batch)


__all__ = ["MicroBatch", "Row", "Step", "accumulation", "arrange", "micro_candidates", "pack", "padded_tokens"]

"""What changes over a soak's steps though it should not: memory between steps, the pace of steps, the loss.

With these limits `python -m benchmarks.planted` finds the planted leak, and no sound configuration fails its soak.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

LEAST_FOR_GROWTH = 30  # steps, before memory between steps can be said to grow
# How many times as long as the first third, a padded token, the last third of the steps may take; and how many times as
# long as before early steps may take when they are trained again.
MOST_SLOWING = 1.3
LEAST_FOR_PACE = 15  # undisturbed steps, before their pace can be said to change
NOISE_BYTES = 4 << 20  # differences of memory between steps that are not taken for growth


def fifths(losses: Sequence[float]) -> list[float]:
    """The median loss of each fifth of the steps: single batches' losses differ by more than training changes them."""
    ends = [len(losses) * part // 5 for part in range(6)]
    parts = [losses[begin:end] for begin, end in pairwise(ends)]
    return [statistics.median(part) for part in parts if part]


def thirds(values: Sequence[float]) -> tuple[float, float, float]:
    """The medians of the first, the second and the last third."""
    third = len(values) // 3
    return (
        statistics.median(values[:third]),
        statistics.median(values[third : 2 * third]),
        statistics.median(values[2 * third :]),
    )


def slowing(paces: list[float]) -> bool:
    """Whether the last third of the steps seems to have taken clearly longer a padded token than the first third did.

    `paces` are those of the steps during which no other process used the device. Short steps take longer a token than
    long ones, so that where steps differ much in length, they may seem slower by chance.
    """
    if len(paces) < LEAST_FOR_PACE:
        return False
    first, _, last = thirds(paces)
    return last > MOST_SLOWING * first


def growth(live: list[int]) -> float:
    """By how many bytes a step the memory in use between steps seems to grow; 0 where it does not.

    The medians of the first, second and last third of the steps must rise, the second rise at least half of the first.
    """
    if len(live) < LEAST_FOR_GROWTH or len(live) % 10:
        return 0.0
    first, second, last = thirds(live)
    if second - first > NOISE_BYTES and last - second > max(NOISE_BYTES, 0.5 * (second - first)):
        return (last - first) / (len(live) * 2 / 3)
    return 0.0


def grown(live: list[int]) -> float | None:
    """By how many bytes the last third of the steps holds more between steps than the first; None of too few steps."""
    if len(live) < LEAST_FOR_GROWTH:
        return None
    first, _, last = thirds(live)
    return last - first


def longest_pause(live: Sequence[int]) -> int:
    """The most steps in a row in which memory came to no new maximum: a leak may grow in jumps."""
    longest = since = 0
    most = live[0] if live else 0
    for now in live[1:]:
        since = 0 if now > most else since + 1
        most, longest = max(most, now), max(longest, since)
    return longest

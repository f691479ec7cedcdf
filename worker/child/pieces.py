"""Timings of a work unit's pieces, micro batches and updates, and the interval of their sum by a bootstrap."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

# The share of the device that other processes may use while a timing counts as clean: chosen, not measured. What is
# disturbed is repeated and verified in turns; `python -m benchmarks.noise` tells how answers fare beside a neighbour.
MOST_OTHERS = 0.10
BOOTSTRAP = 1000  # draws


@dataclass
class Pieces:
    """Timings of the unit's pieces: each micro batch, and each update with the wait for the next step's batches.

    A piece is (step, place in the step). `clean` timings had the device to themselves, `dirty` ones did not; `unknown`
    counts the clean ones for which the device could not tell.
    """

    clean: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    dirty: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    worst_share: float | None = None
    unknown: int = 0

    def add(self, piece: tuple[int, int], seconds: float, share: float | None) -> None:
        """Add a timing and the share of the device that other processes used, None where the device cannot tell."""
        if share is None:
            self.unknown += 1
        else:
            self.worst_share = max(self.worst_share or 0.0, share)
        (self.clean if share is None or share <= MOST_OTHERS else self.dirty).setdefault(piece, []).append(seconds)

    def short(self, pieces: int, wanted: int) -> bool:
        """Whether some piece has fewer clean timings than wanted."""
        return len(self.clean) < pieces or any(len(times) < wanted for times in self.clean.values())

    def seconds(self) -> float:
        """All that was timed."""
        return sum(sum(times) for times in (*self.clean.values(), *self.dirty.values()))

    def best(self) -> dict[tuple[int, int], list[float]]:
        """Each piece's clean timings, or its disturbed timings where it has no clean one."""
        return {piece: times for piece, times in self.dirty.items() if piece not in self.clean} | self.clean

    def clean_share(self) -> float | None:
        """The share of timings that are known to be clean, or None where nothing is known of any."""
        clean = sum(map(len, self.clean.values()))
        count = clean + sum(map(len, self.dirty.values()))
        return None if count and self.unknown == count else (clean - self.unknown) / max(1, count)


def stalling(pieces: dict[tuple[int, int], list[float]]) -> float:
    """How many times as long the pieces take by the means of their timings as by the medians.

    A step that stalls now and then, as when an allocator has to free its cache, is in no median of three passes.
    """
    return sum(map(statistics.fmean, pieces.values())) / sum(map(statistics.median, pieces.values()))


def interval(pieces: dict[tuple[int, int], list[float]], away: list[float] | None = None) -> tuple[float, float, float]:
    """(sum of the pieces' medians, low, high): the 95% interval of that sum by a bootstrap.

    Each piece has few timings, so the relative residuals around the medians are pooled over all pieces that have more
    than one timing, widened by sqrt(n / (n - 1)) because residuals of n timings understate the spread, and drawn with
    replacement. Where most pieces have a single timing, `away` replaces the residuals: the relative distances of the
    timings from what their shapes predict.
    """
    medians = [statistics.median(times) for times in pieces.values()]
    total = sum(medians)
    residuals = [
        (value / median - 1) * (len(times) / (len(times) - 1)) ** 0.5
        for times, median in zip(pieces.values(), medians, strict=True)
        for value in times
        if median and len(times) > 1
    ]
    if len(residuals) <= len(medians):
        residuals = away or residuals or [0.0]
    rng = random.Random(0)
    counts = [len(times) for times in pieces.values()]
    # One draw stands for the mean of a piece's timings, so its spread shrinks with their number.
    sums = sorted(
        sum(median * (1 + rng.choice(residuals) / count**0.5) for median, count in zip(medians, counts, strict=True))
        for _ in range(BOOTSTRAP)
    )
    return total, min(total, sums[int(0.025 * BOOTSTRAP)]), max(total, sums[int(0.975 * BOOTSTRAP)])

"""Windows: the steps between two waits for the device, and what other processes used of it meanwhile."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import torch

WINDOW_SECONDS = 0.3  # the shortest time over which other processes' share is judged (docs/decisions/0012)


@dataclass(frozen=True)
class Mark:
    """A piece that was launched: the device's marks at its two ends, and the turn in which that was."""

    piece: tuple[int, int]
    begun: Any
    ended: Any
    turn: int


@dataclass
class Window:
    """The steps since the device was last waited for: their marks, and readings of what other processes used."""

    readings: list[tuple[int, Any]]
    began: float
    marks: list[Mark] = field(default_factory=list)
    waits: list[tuple[int, Any, Any]] = field(default_factory=list)
    results: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def read(self, reading: Any) -> None:
        """Add a reading of the other processes' use, taken at the last mark."""
        self.readings.append((len(self.marks), reading))
        self.began = time.perf_counter()

    def merge_short_end(self, before: Window | None) -> None:
        """Add a last span shorter than WINDOW_SECONDS to the one before it, as it is too short to be judged alone.

        A pause between two turns is no part of any span: the readings before and after it have the same mark.
        """
        if self.is_long():
            return
        if len(self.readings) > 1 and self.readings[-1][0] > self.readings[-2][0]:
            self.readings.pop()
        elif len(self.readings) == 1 and before is not None:
            self.readings[0] = (0, before.readings[-2][1])

    def is_long(self) -> bool:
        """Whether enough time has passed since the last reading for the share between two readings to mean anything."""
        return time.perf_counter() - self.began >= WINDOW_SECONDS

    def spans(self) -> list[tuple[int, int, Any, Any]]:
        """(first mark, mark after the last, reading before, reading after) for each pair of successive readings."""
        pairs = itertools.pairwise(self.readings)
        return [(first, last, before, after) for (first, before), (last, after) in pairs]

"""A child's side of taking turns: it trains a part of the work unit when it is told to, and waits between the parts.

Candidates that are compared are alive at the same time and train in turns of a second or two, because a shared
machine changes its pace from minute to minute: what slows the one slows the other too, and drops out of their ratio
(Bulej et al., "Duet Benchmarking", ICPE 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from service.contract.child import Paused, Turn
from training.samples import Step
from worker.child.arrange import padded_shape

NEARLY = 1e-9  # of a pass: what rounding may leave of a turn


class Turns:
    """Tells when the turn of a unit's training is over, by the share of the unit's padded tokens that are trained."""

    def __init__(
        self, plan: list[Step], lengths: list[int], tell: Callable[[Paused], None], hear: Callable[[], Turn]
    ) -> None:
        self._tell, self._hear = tell, hear
        total = 0
        self._tokens: dict[tuple[int, int], int] = {}  # (step, micro batches of it that are trained) -> padded tokens
        for number, step in enumerate(plan):
            for at, micro in enumerate(step):
                total += math.prod(padded_shape(micro, lengths))
                self._tokens[number, at + 1] = total
        self._total, self._passes, self._done = total, 0, 0.0
        self.number, self._turn = -1, Turn(passes=1)
        self.pause()

    @property
    def are_over(self) -> bool:
        """Whether the last turn has been trained."""
        return self._turn.last and self._is_over()

    def trained(self, step: int, micro_batches: int) -> bool:
        """Whether the turn is over, now that so many micro batches of a step are trained."""
        tokens = self._tokens[step, micro_batches]
        self._done = self._passes + tokens / self._total
        if tokens == self._total:
            self._passes += 1
        return self._is_over()

    def pause(self) -> None:
        """Say that the turn is over and wait for the next, until there is one with something to train.

        After the last turn there is no other: the child ends with its result.
        """
        while not self.are_over:
            self._tell(Paused())
            self._turn = self._hear()
            self.number += 1
            if not self._is_over():
                return

    def _is_over(self) -> bool:
        return self._done >= self._turn.passes - NEARLY

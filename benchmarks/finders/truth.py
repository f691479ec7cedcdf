"""The largest size that fits: 5 of 5 fresh children run a few full steps at it, and one larger fails."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

CHILDREN = 5


@dataclass
class Truth:
    """Asks children, and keeps what they said: size -> whether each fitted."""

    fits: Callable[[int], bool]
    at_once: int = 1
    seen: dict[int, list[bool]] = field(default_factory=dict)

    def ask(self, size: int, children: int = 1) -> bool:
        """Whether all of so many children fitted; children already asked count, and a failure ends it."""
        answers = self.seen.setdefault(size, [])
        with ThreadPoolExecutor(self.at_once) as pool:
            while all(answers) and len(answers) < children:
                few = min(self.at_once, children - len(answers))
                answers += pool.map(self.fits, [size] * few)
        return all(answers)

    def largest(self, start: int) -> int:
        """The largest size that 5 of 5 children fit, from a first guess; 0 when not even 1 fits.

        Single children find where it turns, by doubling steps away from the guess and halving them again; then the
        size must fit five times, or the one below it must. Above it at least one child has failed.
        """
        low, high = self._bracket(max(1, start))
        while high - low > 1:
            middle = (low + high) // 2
            if self.ask(middle):
                low = middle
            else:
                high = middle
        while low and not self.ask(low, CHILDREN):
            low -= 1
        return low

    def _bracket(self, start: int) -> tuple[int, int]:
        """(a size that fits or 0, a larger one that does not)."""
        step = 1
        if self.ask(start + 1):
            low = start + 1
            while self.ask(low + step):
                low, step = low + step, step * 2
            return low, low + step
        high = start + 1
        while high - step > 0 and not self.ask(high - step):
            high, step = high - step, step * 2
        return max(0, high - step), high

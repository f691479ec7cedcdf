"""Patience with workers after an outage, in which their leases ran out because nobody could renew them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from service.contract.task import LEASE_SECONDS

LEAST_GAP = 6.0  # seconds, longer than any pause between two calls


def since_boot() -> float:
    """Seconds on a clock that goes on while the machine is suspended, which `time.monotonic` does not on Linux."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Patience:
    """Says whether tasks may be taken from workers whose leases ran out.

    After an outage, leases that ran out are left alone for the time of one lease, so that living workers can renew
    theirs. Otherwise every running trial would be queued again, and a task that lived through three outages would be
    given up as one that kills its workers.
    """

    def __init__(self, seconds: float = LEASE_SECONDS, clock: Callable[[], float] = since_boot) -> None:
        self.seconds, self._clock = seconds, clock  # of a lease
        self._since = self._seen = -math.inf

    def begin(self) -> None:
        """The queue did not answer, or this process has just started, perhaps after an outage."""
        self._since = self._seen = self._clock()

    def go_on(self) -> None:
        """Called every few seconds. A gap of half a lease means that this process stood still, as others may have."""
        now = self._clock()
        if now - self._seen > max(self.seconds / 2, LEAST_GAP):
            self._since = now
        self._seen = now

    def is_over(self) -> bool:
        """Whether an outage is long enough ago."""
        return self._clock() - self._since >= self.seconds

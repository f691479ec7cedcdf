"""The job's budget of trials and minutes: a part of the minutes, and what trials leave over, is for verification."""

from __future__ import annotations

import statistics

from service.contract.configuration import Configuration
from service.contract.states import Origin
from service.contract.task import LEAST_SOAK_SECONDS, PlanInput
from service.levers import is_compiled

# Of the job's minutes (docs/decisions/0008), but as much as the verification will take if that is no more than half.
VERIFY_SHARE, MOST_SHARE = 0.25, 0.5
HELD_UNITS = 6.0  # work units of the fastest candidate, which the replays of a proof take about
VERIFY_STARTS = 60.0  # seconds for the processes of a verification to load, beside the soak
GRACE_SHARE = 0.1  # of the job's minutes, by which a verification may go past them where trials took longer
LEAST_VERIFY = 1.0  # seconds: two blocks, a proof and a soak run however little time is left
COMPILE_FACTOR = 2.5  # times the usual time limit, for a trial that compiles
COMPILE_ROOM = 10.0  # median trials that must fit in the time left for one that compiles, as each block compiles again
PATIENCE = 3.0  # times the longest trial so far: the time limit of a trial
LEAST_LIMIT = 45.0  # seconds


class Budget:
    """How many trials and seconds are left when a plan is made."""

    def __init__(self, known: PlanInput) -> None:
        self._known = known
        self._seconds = known.spec.search.minutes * 60
        spent = [
            sum(one.measurement.time_spent.values())
            for one in known.history
            if one.request.origin is not Origin.baseline
        ]
        self._typical = statistics.median(spent) if spent else 0.0
        self._longest = max((sum(one.measurement.time_spent.values()) for one in known.history), default=0.0)

    def left(self) -> float:
        """Seconds that are left for trials."""
        kept = max(self._seconds * VERIFY_SHARE, min(self._verification(), self._seconds * MOST_SHARE))
        return self._seconds - kept - self._known.elapsed_seconds

    def _verification(self) -> float:
        """About how many seconds a verification takes: two blocks of baseline and finalists, a proof, and a soak."""
        units = [one.measurement.timing.seconds for one in self._known.history if one.measurement.timing]
        if not units:
            return 0.0
        fastest, blocks = min(units), 2 * (max(units) + 3 * min(units))
        return blocks + HELD_UNITS * fastest + LEAST_SOAK_SECONDS + VERIFY_STARTS

    def allows(self, planned: int) -> bool:
        """Whether another trial may begin beside `planned` new ones, as there is time for a trial of median length."""
        count = len(self._known.history) + len(self._known.open_trials) + planned
        return count < self._known.spec.search.trials and self.left() > self._typical

    def trials_left(self, planned: int) -> float:
        """About how many more trials fit beside `planned` new ones, by their number and by their median length."""
        count = len(self._known.history) + len(self._known.open_trials) + planned
        by_number = self._known.spec.search.trials - count
        return min(by_number, self.left() / self._typical) if self._typical else by_number

    def affords(self, configuration: Configuration) -> bool:
        """Whether there is time for this configuration; one that compiles takes longer to try and to verify."""
        if is_compiled(configuration.levers):
            return self.left() > COMPILE_ROOM * (self._typical or self._longest)
        return self.left() > self._typical

    def trial_limit(self, configuration: Configuration, origin: Origin) -> float:
        """The time limit of a trial in seconds: a few times the longest trial so far.

        The baseline may use the job's whole time, since all other trials are compared with it.
        """
        if origin is Origin.baseline or not self._longest:
            return max(LEAST_LIMIT, self._seconds)
        factor = COMPILE_FACTOR if is_compiled(configuration.levers) else 1.0
        return max(LEAST_LIMIT, min(PATIENCE * factor * self._longest, self._seconds))

    def verify_seconds(self, methods: int) -> float:
        """Seconds for the next verification, when that many methods are still to be verified."""
        left, grace = self._seconds - self._known.elapsed_seconds, self._seconds * GRACE_SHARE
        return max(left, grace + min(0.0, left), LEAST_VERIFY) / methods

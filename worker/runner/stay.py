"""How long a worker stays: until it had no task for too long, until a time, or for a grace period after SIGTERM."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from service.contract.duration import seconds_of
from service.contract.task import Claim, TaskKind
from service.errors import Misconfigured
from worker.runner.estimating import SECONDS as ESTIMATE_SECONDS

IDLE_MINUTES = 5.0  # of `--exit-when-idle` without a number
IDLE_OPTION = "--exit-when-idle"
PLAN_SECONDS = 5.0  # that a plan takes, about: mostly the time to import what it needs


@dataclass(frozen=True)
class Terms:
    """The options that end a worker by themselves. `until` is a Unix time; what is None ends no worker."""

    idle_minutes: float | None = None
    until: float | None = None
    grace_seconds: float | None = None

    def options(self) -> list[str]:
        """These terms as options of a worker's command line."""
        until = None if self.until is None else datetime.fromtimestamp(self.until, UTC).isoformat()
        given = {IDLE_OPTION: self.idle_minutes, "--until": until, "--grace": self.grace_seconds}
        return [word for name, value in given.items() if value is not None for word in (name, str(value))]


class Stay:
    """One worker's stay under its terms. Its seconds are those of `clock`, which never goes back."""

    def __init__(
        self,
        terms: Terms,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._terms, self._clock = terms, clock
        self._worked = clock()
        self._end = math.inf if terms.until is None else clock() + terms.until - wall_clock()

    def worked(self) -> None:
        """A task has ended just now, or it is not known whether one waits: from here on the worker is idle."""
        self._worked = self._clock()

    def grace(self) -> None:
        """The worker was told to end: it is over after the grace period, if its terms have one."""
        if self._terms.grace_seconds is not None:
            self._end = min(self._end, self._clock() + self._terms.grace_seconds)

    def over(self) -> bool:
        """Whether the time has come at which a task under way is handed back."""
        return self._clock() >= self._end

    def why_not(self, claim: Claim) -> str | None:
        """Why this task is not begun, or None: it is not expected to end in the time that is left."""
        expected, left = expected_seconds(claim), self._end - self._clock()
        if expected <= left:
            return None
        return f"the next task takes about {expected:.0f} s, and {max(0.0, left):.0f} s are left"

    def why_leave(self, idle: bool) -> str | None:
        """A reason to end now, between two tasks, or None. `idle`: there is no task at the moment."""
        if self.over():
            return "its time is over"
        most = self._terms.idle_minutes
        if idle and most is not None and self._clock() - self._worked >= most * 60:
            return f"it had no task for {most:g} min"
        return None


def expected_seconds(claim: Claim) -> float:
    """What a task is expected to take: 0 for the first trials of a job, of which nobody can know."""
    if claim.kind is TaskKind.plan:
        return PLAN_SECONDS
    if claim.kind is TaskKind.estimate:
        return ESTIMATE_SECONDS
    return claim.request.expected_seconds


def moment(text: str, now: float) -> float:
    """The Unix time of `--until`: an ISO 8601 time (of this machine's zone unless it says another), or a duration.

    Misconfigured when it is neither, or has passed.
    """
    try:
        return now + seconds_of(text)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise Misconfigured(f"--until: {text!r} is no time; write 2026-11-24T08:00, or a duration: 3h50m.") from error
    if at <= now:
        raise Misconfigured(f"--until: {text} has passed.")
    return at


def spelled_out(arguments: list[str]) -> list[str]:
    """The arguments with the number of minutes that `--exit-when-idle` stands for where it is given without one.

    Typer has no options whose value may be left out.
    """
    ends = zip(arguments, [*arguments[1:], "--"], strict=True)
    bare = [at for at, (word, after) in enumerate(ends) if word == IDLE_OPTION and after.startswith("--")]
    return [word for at, one in enumerate(arguments) for word in ((one, f"{IDLE_MINUTES:g}") if at in bare else (one,))]

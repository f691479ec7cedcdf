"""The port through which a worker speaks to the queue, and the one error that says it cannot be reached.

`connect` gives the port's SQL form (service/queue.py). A worker knows this module and nothing of SQL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from service.contract.estimate import Estimate
from service.contract.hardware import HardwareFacts
from service.contract.measurement import Measurement, Verification
from service.contract.task import (
    LEASE_SECONDS,
    Claim,
    EstimateClaim,
    PlanClaim,
    PlanDecision,
    PlanInput,
    TaskKind,
    TrialClaim,
    VerifyClaim,
    Wish,
)

if TYPE_CHECKING:
    from sqlalchemy import Engine


class BrokerUnavailable(Exception):
    """The queue does not answer at the moment; the same call may succeed later."""


class Broker(Protocol):
    """What a worker may ask of the queue.

    Every write about a claim raises LeaseLost once the claim is no longer held; every call raises BrokerUnavailable
    while the queue does not answer.
    """

    def register(self, worker_id: str, pid: int, facts: HardwareFacts) -> None:
        """Announce a worker. From then on, its claims and renewals show that it is alive."""

    def leave(self, worker_id: str) -> None:
        """Say that the worker has ended."""

    def claim(self, worker_id: str, kinds: tuple[TaskKind, ...]) -> Claim | None:
        """Lease the next task of these kinds that this worker's hardware can serve, or None."""

    def renew(self, claim: Claim, progress: str | None = None) -> Wish | None:
        """Extend the lease; the answer is what the user wishes of the job."""

    def plan_input(self, claim: PlanClaim) -> PlanInput:
        """What the plan of the claimed task may know."""

    def finish_plan(self, claim: PlanClaim, decision: PlanDecision) -> None:
        """Carry out a plan's decision."""

    def finish_trial(self, claim: TrialClaim, measurement: Measurement, log: str) -> None:
        """Record a trial's measurement."""

    def finish_verify(self, claim: VerifyClaim, verification: Verification, log: str) -> None:
        """Record a verification."""

    def finish_estimate(self, claim: EstimateClaim, estimate: Estimate) -> None:
        """Record an estimate."""

    def release(self, claim: Claim) -> None:
        """Hand a task back unfinished, for another worker, or for the same one later."""

    def fail(self, claim: Claim, reason: str, log: str = "") -> None:
        """End the task, and the job it belongs to, with a sentence for the user; `log` is the end of the output."""

    def reap(self) -> int:
        """Give the tasks of dead workers to others; the number of them."""


def connect(url: str, lease_seconds: float = LEASE_SECONDS) -> Broker:
    """The broker on a database URL; a worker that is silent for `lease_seconds` loses its task.

    Misconfigured or Unavailable when the URL is no good, the database does not answer, or it has no schema yet.
    """
    from service import db
    from service.queue import Queue

    engine = db.connect(url)
    db.check(engine)
    _translate(engine)
    return Queue(engine, lease_seconds=lease_seconds)


def _translate(engine: Engine) -> None:
    """Have the engine raise BrokerUnavailable where the database is away, locked, or hung up."""
    from sqlalchemy import ExceptionContext, event
    from sqlalchemy.exc import InterfaceError, OperationalError

    @event.listens_for(engine, "handle_error")
    def _unavailable(context: ExceptionContext) -> BrokerUnavailable | None:
        away = isinstance(context.sqlalchemy_exception, OperationalError | InterfaceError) or context.is_disconnect
        # The ping before a connection is used again is allowed to fail: another connection is then opened.
        return BrokerUnavailable(str(context.original_exception)) if away and not context.is_pre_ping else None


__all__ = ["Broker", "BrokerUnavailable", "connect"]

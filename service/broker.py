"""The interface between a worker and the queue.

`connect` gives the one in SQL (service/queue.py) or, for an http URL, the one over HTTP (service/remote.py). A worker
imports this module and knows nothing of SQL.
"""

from __future__ import annotations

from pathlib import Path
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
from service.errors import BrokerUnavailable

if TYPE_CHECKING:
    from sqlalchemy import Engine


class Broker(Protocol):
    """The calls that a worker may make to the queue.

    Every call that writes about a claim raises LeaseLost once the worker has lost the claim's lease; every call raises
    BrokerUnavailable while the queue does not answer.
    """

    def register(self, worker_id: str, pid: int, facts: HardwareFacts) -> None:
        """Announce a worker. From then on, its claims and renewals show that it is alive."""

    def leave(self, worker_id: str) -> None:
        """Remove a worker that ends."""

    def claim(self, worker_id: str, kinds: tuple[TaskKind, ...]) -> Claim | None:
        """Lease the next task of these kinds that this worker's hardware can serve, or None.

        Drained when the worker was told to end.
        """

    def renew(self, claim: Claim, progress: str | None = None, log: str | None = None) -> Wish | None:
        """Extend the lease; return what the user has asked of the claim's job since, if anything.

        `progress` says what the task is doing, `log` is the end of what it has printed so far.
        """

    def plan_input(self, claim: PlanClaim) -> PlanInput:
        """The input of the claimed plan: all that it may know of its job."""

    def finish_plan(self, claim: PlanClaim, decision: PlanDecision) -> None:
        """Carry out a plan's decision: queue its tasks, or end the job."""

    def finish_trial(self, claim: TrialClaim, measurement: Measurement, log: str) -> None:
        """Record a trial's measurement."""

    def finish_verify(self, claim: VerifyClaim, verification: Verification, log: str) -> None:
        """Record a verification."""

    def finish_estimate(self, claim: EstimateClaim, estimate: Estimate) -> None:
        """Record an estimate."""

    def release(self, claim: Claim) -> None:
        """Hand a task back unfinished, to be claimed again by any worker."""

    def fail(self, claim: Claim, reason: str, log: str = "") -> None:
        """Fail the task, and its job if it has one, with a sentence for the user; `log` is the end of the output."""

    def fetch(self, source: str, folder: Path) -> None:
        """Have the data that a user sent (`upload:…`) in the folder; without effect for other sources."""

    def reap(self) -> int:
        """Queue again the tasks whose leases have expired, as their workers are dead; return how many there were."""


def connect(url: str, lease_seconds: float = LEASE_SECONDS, key: str | None = None) -> Broker:
    """The broker on a database URL, or on the http(s) URL of a control plane, which may ask for an API key.

    A worker that renews no lease for `lease_seconds` loses its task; a control plane decides that itself. Misconfigured
    when the URL is neither, Unavailable when the database does not answer or has no schema.
    """
    if url.startswith(("http://", "https://")):
        from service.remote import RemoteBroker

        return RemoteBroker(url, key)
    from service import db
    from service.queue import Queue

    engine = db.connect(url)
    db.check(engine)
    _translate(engine)
    return Queue(engine, lease_seconds=lease_seconds, is_of_a_worker=True)


def _translate(engine: Engine) -> None:
    """Have the engine raise BrokerUnavailable where the database is down, locked or damaged, or ends the connection."""
    from sqlalchemy import ExceptionContext, event
    from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

    from service import db

    @event.listens_for(engine, "handle_error")
    def _unavailable(context: ExceptionContext) -> BrokerUnavailable | None:
        error = context.sqlalchemy_exception
        away = isinstance(error, OperationalError | InterfaceError) or context.is_disconnect or db.damaged(error)
        away = away or (isinstance(error, DBAPIError) and db.lacks_schema(error))  # an upgrade has changed the tables
        # The ping before a pooled connection is used again may fail: SQLAlchemy then opens another connection.
        return BrokerUnavailable(str(context.original_exception)) if away and not context.is_pre_ping else None

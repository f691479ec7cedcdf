"""The protocol a worker speaks: claim, renew, finish, release. `connect` gives its SQL form."""

from __future__ import annotations

from typing import Protocol

from service.contract.estimate import Estimate, EstimateClaim
from service.contract.hardware import HardwareFacts
from service.contract.measurement import Measurement, Verification
from service.contract.task import Claim, PlanDecision, PlanInput, TaskKind, Wish
from service.errors import LeaseLost

LEASE_SECONDS = 30.0
WISH_SECONDS = 2.0


class Broker(Protocol):
    """What a worker may ask of the queue. Every write about a claim raises LeaseLost once it is no longer held."""

    def register(self, worker_id: str, pid: int, facts: HardwareFacts) -> None:
        """Announce a worker. From then on, its claims and renewals show that it lives."""

    def leave(self, worker_id: str) -> None:
        """Say that the worker has ended."""

    def claim(self, worker_id: str, kinds: tuple[TaskKind, ...]) -> Claim | None:
        """Lease the next task this worker's hardware can serve, or None."""

    def renew(self, claim: Claim, progress: str | None = None) -> Wish | None:
        """Extend the lease; the answer is what the user wishes of the job."""

    def plan_input(self, claim: Claim) -> PlanInput:
        """What the plan of the claimed task may know."""

    def finish_plan(self, claim: Claim, decision: PlanDecision) -> None:
        """Carry out a plan's decision."""

    def finish_trial(self, claim: Claim, measurement: Measurement, log: str) -> None:
        """Record a trial's measurement."""

    def finish_verify(self, claim: Claim, verification: Verification, log: str) -> None:
        """Record a verification."""

    def release(self, claim: Claim) -> None:
        """Hand a task back, unfinished: somebody else, or the same worker later, takes it."""

    def fail_job(self, claim: Claim, reason: str, log: str = "") -> None:
        """End the claimed task's job with a sentence for its user, the end of the child's output kept."""

    def claim_estimate(self, worker_id: str, fingerprint: str) -> EstimateClaim | None:
        """Lease an estimate to answer, with what is known of its model on this hardware, or None."""

    def finish_estimate(self, claim: EstimateClaim, estimate: Estimate | None, error: str | None = None) -> None:
        """Record an estimate, or why there is none."""

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
    return Queue(engine, lease_seconds=lease_seconds)


__all__ = ["LEASE_SECONDS", "WISH_SECONDS", "Broker", "LeaseLost", "connect"]

"""What a worker says to the control plane over HTTP: one body for each call of `service.broker.Broker`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import Field

from service.contract.base import Contract
from service.contract.estimate import Estimate
from service.contract.hardware import HardwareFacts
from service.contract.measurement import Measurement, Verification
from service.contract.task import (
    Claim,
    EstimateClaim,
    PlanClaim,
    PlanDecision,
    TaskKind,
    TrialClaim,
    VerifyClaim,
    Wish,
)
from service.source import version_of

PATH = "/internal/v1"
VERSION = "X-Dynotune-Version"  # the header in which a worker names its version, which must be the control plane's
MOST_WORKER_BODY_BYTES = 32 << 20  # of what a worker sends at once: a measurement, and the end of its log


class Registration(Contract):
    """A worker announces itself."""

    pid: int = Field(ge=0, lt=2**31)
    facts: HardwareFacts


class ClaimRequest(Contract):
    """A worker asks for a task of one of these kinds.

    `unanswered` says that it never got the answer to its last request. A task that it was given then is handed on.
    """

    worker_id: str = Field(max_length=32)
    kinds: tuple[TaskKind, ...] = Field(min_length=1, max_length=len(TaskKind))
    unanswered: bool = False


class ClaimAnswer(Contract):
    """The task, if there is one."""

    claim: Claim | None


class Renewal(Contract):
    """A worker goes on with a task."""

    claim: Claim
    progress: str | None
    log: str | None


class RenewalAnswer(Contract):
    """What the user has asked of the task's job since."""

    wish: Wish | None


class TaskReleased(Contract):
    """A worker hands a task back unfinished."""

    claim: Claim


class TaskFailed(Contract):
    """A worker could not do a task."""

    claim: Claim
    reason: str
    log: str


class PlanAsked(Contract):
    """A worker asks what the claimed plan may know."""

    claim: PlanClaim


class Planned(PlanAsked):
    """A plan's decision."""

    decision: PlanDecision


class TrialDone(Contract):
    """A trial's measurement, with the end of what its process printed."""

    claim: TrialClaim
    measurement: Measurement
    log: str


class VerifyDone(Contract):
    """A verification, with the end of what its process printed."""

    claim: VerifyClaim
    verification: Verification
    log: str


class EstimateDone(Contract):
    """An estimate."""

    claim: EstimateClaim
    estimate: Estimate


@cache
def spoken_version() -> str:
    """dynotune's version, and eight hex digits of a hash over the source of these models.

    Between two releases the models may change: a worker of another commit would fail at the first new field, and so
    would every task that it is given. The source is hashed, as pydantic's schemas depend on pydantic's version.
    """
    return version_of(Path(__file__).parent)

"""Tasks: the unit of work that a worker leases, what each kind asks for, and what a worker answers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from service.contract.base import Contract
from service.contract.configuration import Configuration
from service.contract.estimate import EstimateRequest, Known
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement, MemoryLine
from service.contract.states import JobPhase, Origin

LEASE_SECONDS = 30.0
WISH_SECONDS = 2.0


class TaskKind(StrEnum):
    """Every expensive thing that a worker does is one of these; all but estimates belong to a job."""

    plan = "plan"
    trial = "trial"
    verify = "verify"
    estimate = "estimate"


class Wish(StrEnum):
    """What a user asked of a job that is under way."""

    cancel = "cancel"
    stop = "stop"


class TrialRequest(Contract):
    """The payload of a trial: a configuration, why it is tried, and what earlier trials learnt."""

    configuration: Configuration
    origin: Origin
    number: int
    confirm_largest: bool = Field(
        default=True, description="Run the largest micro batch the memory line predicts, whatever is timed."
    )
    memory_line: MemoryLine | None = Field(
        default=None, description="The memory line expected from earlier trials: where to begin, never the answer."
    )
    curve: bool = Field(default=True, description="Time the largest micro batch, 3/4 and 1/2 of it, whatever is best.")
    passes: int = Field(default=2, ge=1, description="Passes over the work unit at the fastest micro batch.")
    seconds_limit: float = 3600.0
    best_seconds: float | None = Field(default=None, description="The fastest unit so far: clearly slower ends early.")
    reference_loss: float | None = None
    reference_grad_norm: float | None = None
    reference_rounded: bool = Field(default=False, description="The reference itself computes in 16 bits.")


class VerifyRequest(Contract):
    """The payload of a verification: baseline and finalists with their measured micro batches."""

    method: Method
    baseline: Measurement | None
    finalists: tuple[Measurement, ...]
    reserves: tuple[Measurement, ...] = Field(default=(), description="Next in line, run when no finalist held.")
    reference: Measurement | None = Field(
        default=None, description="What losses are compared with where the baseline has no fp32 master weights."
    )
    blocks: int
    seconds_limit: float


class Leased(Contract):
    """What every claim carries. `task_id` and `attempt` are the fence: a write under an older attempt is refused."""

    task_id: str
    attempt: int


class PlanClaim(Leased):
    """A leased plan: decide what a job does next."""

    kind: Literal[TaskKind.plan] = TaskKind.plan
    job_id: str
    spec: JobSpec


class TrialClaim(Leased):
    """A leased trial: measure one configuration."""

    kind: Literal[TaskKind.trial] = TaskKind.trial
    job_id: str
    spec: JobSpec
    request: TrialRequest


class VerifyClaim(Leased):
    """A leased verification: compare the finalists of one method."""

    kind: Literal[TaskKind.verify] = TaskKind.verify
    job_id: str
    spec: JobSpec
    request: VerifyRequest


class EstimateClaim(Leased):
    """A leased estimate. `known` are lines that trials measured of the same model on the worker's hardware."""

    kind: Literal[TaskKind.estimate] = TaskKind.estimate
    request: EstimateRequest
    known: tuple[Known, ...] = ()


JobClaim = PlanClaim | TrialClaim | VerifyClaim
Claim = Annotated[PlanClaim | TrialClaim | VerifyClaim | EstimateClaim, Field(discriminator="kind")]
CLAIM: TypeAdapter[Claim] = TypeAdapter(Claim)


class TrialRecord(Contract):
    """A finished trial, in finish order, as the plan sees it."""

    request: TrialRequest
    measurement: Measurement


class PlanInput(Contract):
    """All that a plan may know. Same input, same answer."""

    spec: JobSpec
    facts: HardwareFacts
    history: tuple[TrialRecord, ...] = ()
    open_trials: tuple[TrialRequest, ...] = ()
    verified_methods: tuple[Method, ...] = ()
    verify_open: bool = False
    next_number: int = 1
    elapsed_seconds: float = 0.0
    workers: int = 1


class PlanDecision(Contract):
    """What to do next: more trials, a verification, or the end (with `error` when the job failed)."""

    trials: tuple[TrialRequest, ...] = ()
    verify: VerifyRequest | None = None
    finish: bool = False
    error: str | None = None
    phase: JobPhase = JobPhase.searching
    planned_trials: int | None = None
    notes: tuple[str, ...] = ()

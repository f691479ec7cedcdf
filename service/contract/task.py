"""Tasks: the unit of work that a worker leases, what each kind asks for, and what a worker answers."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, model_validator

from service.contract.base import Contract, without_former
from service.contract.configuration import Configuration
from service.contract.estimate import EstimateRequest, Known
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement, MemoryLine
from service.contract.states import JobPhase, Origin

LEASE_SECONDS = 30.0  # seconds without a renewal after which a task goes to another worker
MOST_LOG = 128 << 10  # characters that are kept of the end of a task's output
MOST_LEASE_SECONDS = 300.0  # that a worker may ask for
EVALUATED = {"quick": 64, "standard": 1024, "strict": 4096}  # validation samples of a soak's evaluation, at most
LEAST_SOAK_SECONDS = 30.0  # even if a verification's time is up
# The share of a job's minutes that trials leave to the verification, at least (docs/decisions/0008).
VERIFY_SHARE = 0.25
# Blocks that a verification is given time for, and has before it may end early, because what one pair of processes
# shows, another may not. It may have one only where trials took longer than expected.
LEAST_BLOCKS = 2
# A block repeats the work unit until its slowest candidate has been timed for BLOCK_SECONDS, MOST_BLOCK_PASSES times at
# most. Within its first FEW_BLOCK_PASSES passes it goes on to LONG_BLOCK_SECONDS. Neither is longer than
# MOST_BLOCK_SHARE of the job's minutes, as a verification times two candidates in two blocks.
LONG_BLOCK_SECONDS, FEW_BLOCK_PASSES = 10.0, 5
BLOCK_SECONDS, MOST_BLOCK_PASSES = 3.0, 50
MOST_BLOCK_SHARE = 0.05
WISH_SECONDS = 2.0  # between a worker's renewals, each of which also reads the user's wish


class TaskKind(StrEnum):
    """The kinds of work that a worker does. All tasks but estimates belong to a job."""

    plan = "plan"
    trial = "trial"
    verify = "verify"
    estimate = "estimate"


class Wish(StrEnum):
    """What a user asks of a running job: to end as cancelled (`cancel`), or with its best so far (`stop`)."""

    cancel = "cancel"
    stop = "stop"


class TrialRequest(Contract):
    """The payload of a trial: a configuration, which part of the search asks for it, and what earlier trials tell."""

    configuration: Configuration
    origin: Origin
    number: int = Field(ge=0, lt=2**31)
    confirm_largest: bool = Field(
        default=True, description="Run the largest micro batch that the memory line predicts, even if it is not timed."
    )
    memory_line: MemoryLine | None = Field(
        default=None, description="The memory line expected from earlier trials: only where the probe begins."
    )
    curve: bool = Field(default=True, description="Time the largest micro batch, 3/4 and 1/2 of it, too.")
    passes: int = Field(default=2, ge=1, description="Passes over the work unit at the fastest micro batch.")
    seconds_limit: float = 3600.0
    expected_seconds: float = Field(
        default=0.0, description="What it may take, as the longest trial of the job did; 0 where none has run."
    )
    first_micro_batch: int | None = Field(
        default=None, description="The fastest trial's with the same batching, which a CPU times first."
    )
    best_seconds: float | None = Field(
        default=None, description="Seconds of the fastest unit so far; a clearly slower trial ends early."
    )
    slowest_run_seconds: float | None = Field(
        default=None, description="With the objective memory: what the whole run may take, which is the baseline's."
    )
    reference_loss: float | None = None
    reference_grad_norm: float | None = None
    reference_rounded: bool = Field(default=False, description="The reference itself computes in 16 bits.")


def block_passes(slowest: float, minutes: float) -> int:
    """How often a block trains the work unit, which takes the slowest candidate so many seconds, in a job of `minutes`.

    It trains the unit once at least, however short the job is.
    """
    most = MOST_BLOCK_SHARE * minutes * 60
    few = min(FEW_BLOCK_PASSES, math.ceil(min(LONG_BLOCK_SECONDS, most) / slowest))
    return max(1, few, min(MOST_BLOCK_PASSES, math.ceil(min(BLOCK_SECONDS, most) / slowest)))


def keeps_process(candidate: Measurement) -> bool:
    """Whether a process should train two blocks: its adapter can be drawn anew, and loading takes longer than a block.

    Elsewhere a process of its own for each block costs little, and tells more of how processes differ.
    """
    is_slow = candidate.timing is not None and candidate.load_seconds > candidate.timing.seconds
    return is_slow and candidate.configuration.method != "full"


class VerifyRequest(Contract):
    """The payload of a verification: baseline and finalists with their measured micro batches."""

    method: Method
    baseline: Measurement | None
    finalists: tuple[Measurement, ...]
    reserves: tuple[Measurement, ...] = Field(default=(), description="Run in turn when no finalist is stable.")
    taken_back: tuple[Measurement, ...] = Field(
        default=(), description="Finalists with one lever taken back each; those of the fastest take turns with it."
    )
    blocks: int
    seconds_limit: float
    expected_seconds: float = Field(default=0.0, description="What it may take; it may be more than the limit.")
    _former = model_validator(mode="before")(without_former("reference"))


class Leased(Contract):
    """The base of all claims. The attempt is the fencing token: a write under an older attempt is refused."""

    task_id: str
    attempt: int = Field(ge=0, lt=2**31)


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
    """A leased estimate. `known` are memory lines that trials have measured of the same model on the same hardware."""

    kind: Literal[TaskKind.estimate] = TaskKind.estimate
    request: EstimateRequest
    known: tuple[Known, ...] = ()


JobClaim = PlanClaim | TrialClaim | VerifyClaim
Claim = Annotated[PlanClaim | TrialClaim | VerifyClaim | EstimateClaim, Field(discriminator="kind")]
CLAIM: TypeAdapter[Claim] = TypeAdapter(Claim)


class TrialRecord(Contract):
    """A finished trial: what was asked for, and what was measured."""

    request: TrialRequest
    measurement: Measurement


class EarlierTrial(Contract):
    """A successful trial of an earlier job on the same hardware, as far as the plan of another job needs it."""

    configuration: Configuration
    ratio: float = Field(gt=0, description="Its seconds a sample over those of its own job's baseline.")
    parameters: int | None = Field(description="Of the model.")
    dataset: str | None = Field(description="The fingerprint of the data that it was measured with.")
    same_job: bool = Field(description="That job asked for the same, apart from its name and how it is searched.")


class PlanInput(Contract):
    """All that a plan may know, with the `history` in finish order. The same input gives the same decision."""

    spec: JobSpec
    facts: HardwareFacts
    history: tuple[TrialRecord, ...] = ()
    earlier: tuple[EarlierTrial, ...] = Field(default=(), description="Of other jobs, those of the same job first.")
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
    planned_trials: int | None = Field(default=None, ge=0, lt=2**31)
    notes: tuple[str, ...] = ()

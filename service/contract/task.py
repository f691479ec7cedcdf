"""Tasks: the unit of work a worker leases, and what goes in and out of each kind."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from service.contract.base import Contract
from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement, MemoryLine
from service.contract.states import JobPhase, Origin


class TaskKind(StrEnum):
    """Every expensive thing done for a job is one of these."""

    plan = "plan"
    trial = "trial"
    verify = "verify"


class Wish(StrEnum):
    """What a user asked of a job that is under way."""

    cancel = "cancel"
    stop = "stop"


class Claim(Contract):
    """A leased task. Every write about it carries `task_id` and `attempt`: the fence."""

    task_id: str
    attempt: int
    job_id: str
    kind: TaskKind
    spec: JobSpec
    payload: dict[str, Any]


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

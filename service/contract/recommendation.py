"""Recommendation: the answer to a job, its evidence, and everything needed to train with it or to check it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from service.contract.base import Contract
from service.contract.job import Method
from service.contract.measurement import DatasetFacts, Measurement, Outcome, Verdict

SCHEMA_VERSION = "1"


class RecommendedConfiguration(Contract):
    """The choice for every lever, and the batch sizes by the names that `TrainingArguments` gives them."""

    method: Method
    levers: dict[str, str]
    micro_batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int
    evaluation_batch_size: int
    learning_rate: float
    token_budget: int | None = Field(
        default=None,
        description="Padded tokens a micro batch; `micro_batch_size` then counts rows of the longest length.",
    )
    adapter_excludes: tuple[str, ...] = Field(default=(), description="Modules that are trained whole, not adapted.")
    adapter_saves: tuple[str, ...] = Field(
        default=(), description="Layers that the checkpoint lacks: drawn, trained whole, and saved with the adapter."
    )
    rows_are_packed: bool = Field(description="If so, `micro_batch_size` counts rows of max_length tokens.")


class ObjectiveFigure(Contract):
    """What the answer is best at, in the objective's own unit, and what the baseline has in its place."""

    name: str = Field(description="wall-clock, throughput, memory or cost.", examples=["cost"])
    unit: str = Field(
        description="Of wall-clock: seconds; of throughput: tokens/s; of memory: bytes; of cost: money, in the "
        "currency of the price an hour.",
        examples=["money"],
    )
    value: float | None
    baseline: float | None


class Evidence(Contract):
    """The winner's and the baseline's measurements, and how they compare."""

    measurement: Measurement
    baseline: Measurement | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    speedup_from: str = Field(description="What the speed-up was computed from: verification blocks or single trials.")
    tokens_per_second: float
    tokens_per_second_low: float
    tokens_per_second_high: float
    samples_per_second: float
    step_seconds: float
    peak_bytes: int | None
    headroom_bytes: int | None
    run_seconds: float = Field(description="Estimated wall-clock of the user's run: load, compile, steps, evaluations.")
    baseline_run_seconds: float | None = Field(default=None, description="The same with the baseline, by the speed-up.")
    objective: ObjectiveFigure | None = Field(default=None, description="The job's objective, in its unit.")
    run_cost: float | None = Field(default=None, description="Of the run, where the job gives a price an hour.")
    baseline_run_cost: float | None = None


class Stability(Contract):
    """Whether the configuration is stable, and what was run, or not run, to find that out."""

    stable: bool | None = Field(
        description="None until the verification has run, and where there was no baseline to compare with."
    )
    reasons: tuple[str, ...] = ()
    verdict: Verdict | None = None
    statement: str


class Rejected(Contract):
    """A configuration that failed in its trial or in the verification, and why."""

    method: Method
    levers: dict[str, str]
    outcome: Outcome | Literal["slower"]
    reason: str


class Instead(Contract):
    """A measured configuration for another aim, with what it costs. Its figures are a single trial's."""

    aim: str = Field(
        description="no-compile, exact-numerics, plain-arguments, and least-memory, or fastest with objective memory."
    )
    meaning: str
    levers: dict[str, str]
    micro_batch_size: int
    effective_batch_size: int
    speed: float = Field(description="The recommended configuration's seconds over its own.")
    tokens_per_second: float | None
    peak_bytes: int | None


class Contribution(Contract):
    """What one lever of the best configuration brings: how much longer the run takes without it.

    With the objective memory, how much more memory it takes.
    """

    lever: str = Field(examples=["batching"])
    baseline: str = Field(description="The baseline's choice.", examples=["padded"])
    choice: str = Field(description="The best configuration's choice.", examples=["grouped"])
    factor: float | None = Field(
        description="The run's seconds (or peak bytes) with the baseline's choice over those with the best's."
    )
    low: float | None = Field(description="The low end of the factor's 95% interval.")
    high: float | None
    reason: str = Field(description="Why there is no factor; empty where there is one.")


class Winner(Contract):
    """The best configuration of one method, with the arguments by which transformers and peft set it up."""

    configuration: RecommendedConfiguration
    TrainingArguments: dict[str, Any]
    LoraConfig: dict[str, Any] | None
    BitsAndBytesConfig: dict[str, Any] | None
    from_pretrained: dict[str, Any]
    not_expressible: tuple[str, ...] = Field(
        default=(), description="What these arguments cannot express; train.py does it."
    )
    evidence: Evidence
    stability: Stability
    verdicts: tuple[Verdict, ...] = Field(default=(), description="All finalists of the verification, baseline too.")


class Recommendation(Winner):
    """The answer to a job: the stable configuration that is best by the job's objective, over all its methods."""

    schema_version: str = SCHEMA_VERSION
    job_id: str
    job_name: str
    final: bool
    weights: str
    notes: tuple[str, ...] = ()
    methods: dict[str, Winner] = Field(default_factory=dict, description="One winner a method.")
    environment: dict[str, Any]
    dataset: DatasetFacts | None
    alternatives: tuple[Measurement, ...] = ()
    contributions: tuple[Contribution, ...] = Field(
        default=(), description="What each lever brings that is not as in the baseline, the largest first."
    )
    instead: tuple[Instead, ...] = Field(default=(), description="What to take for another aim.")
    rejected: tuple[Rejected, ...] = ()
    time_spent: dict[str, float] = Field(
        default_factory=dict,
        description="Seconds of all trials by phase (prepare is what the first does for all, failed those of processes "
        "that came to nothing; load, probe, compile, warm-up, timing and others; processes is the rest), of "
        "verifications, of planning, and idle: while no task of the job ran on any worker.",
    )
    spec: dict[str, Any] = Field(description="The job, at the revisions of model and data that were measured.")
    reproduce: str

"""What the REST API answers: one model for each answer, which the routes and `service.client.Client` return."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from service.contract.base import Contract
from service.contract.configuration import Configuration
from service.contract.estimate import Estimate
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement, MemoryLine, Outcome
from service.contract.recommendation import Contribution, ObjectiveFigure
from service.contract.states import EstimateStatus, JobPhase, JobStatus, Origin, ProbePhase, TaskState, WorkerState


class View(Contract):
    """The base of all answers, whose unknown fields are ignored, so that a client may be older than its control plane.

    Other models within them, such as a job's spec or a trial's measurement, refuse unknown fields as everywhere.
    """

    model_config = ConfigDict(extra="ignore", defer_build=True)  # a command needs one or two of them

    @classmethod
    def of(cls, source: object, **more: Any) -> Self:
        """The view of an object that has attributes of the fields' names; `more` gives those that it has not."""
        return cls.model_validate(more | {name: getattr(source, name) for name in cls.model_fields if name not in more})


class JobState(View):
    """The answer to a submission, a cancellation or a stop: the job's id and the status it has now."""

    id: str = Field(examples=["5f1d7a90c2e84b36"])
    status: JobStatus


class JobSummary(JobState):
    """A job as lists show it. Times are seconds since 1970 (UTC)."""

    name: str
    labels: dict[str, str] = Field(examples=[{"team": "nlp"}])
    priority: int = 0
    owner: str | None = Field(default=None, description="Of the API key that submitted it; null without keys.")
    phase: JobPhase
    error: str | None = Field(description="Why the job failed.")
    created_at: float
    started_at: float | None
    finished_at: float | None
    elapsed_seconds: float


class JobProgress(View):
    """How many trials a job has run, and what it is doing."""

    trials: dict[str, int] = Field(
        description="Number of trials by outcome, or by state where they have not ended.",
        examples=[{"ok": 3, "running": 1}],
    )
    planned: int | None = Field(description="Number of trials that the search expects to run.")
    now: str | None = Field(description="What a worker is doing.", examples=["trial 4: timing"])


class BestSoFar(View):
    """The best configuration by the job's objective that a job has measured so far, in short."""

    method: Method
    levers: dict[str, str] = Field(examples=[{"precision": "fp32", "batching": "grouped"}])
    micro_batch_size: int
    tokens_per_second: float
    speedup: float | None = Field(description="Against the measured baseline; null when there is none.")
    stable: bool | None = Field(description="null until it has been verified.")
    objective: ObjectiveFigure | None = Field(default=None, description="The job's objective, in its unit.")


class JobView(JobSummary):
    """A single job, with its progress, its best configuration so far and its spec."""

    version: int = Field(default=0, description="The `seq` of the job's last event.")
    progress: JobProgress
    best: BestSoFar | None
    estimated_finish_at: float | None = Field(description="null before it begins, and while it waits for a worker.")
    waiting_for: str | None = Field(description="Why no worker takes the job, when none does.")
    notes: tuple[str, ...]
    spec: JobSpec


class Fit(View):
    """Whether a living worker could serve a job; `why_not` says what is in the way."""

    worker: str
    can_serve: bool
    why_not: str | None


class SpaceView(View):
    """What a job would search on one worker: for each method, the choices of each lever."""

    worker: str
    cannot: dict[str, str] = Field(description="Methods that cannot run there, and why.")
    choices: dict[str, dict[str, tuple[str, ...]]]
    combinations_at_most: int = Field(description="Of all choices; some of the combinations exclude each other.")


class JobCheck(View):
    """What is known of a job before it is submitted."""

    spec: JobSpec = Field(description="With all defaults filled in.")
    workers: tuple[Fit, ...]
    search: tuple[SpaceView, ...] = Field(description="On each worker that could serve it.")
    seconds_at_most: float = Field(description="That the search may take; its verification may end somewhat later.")
    seconds_of_jobs_alike: float | None = Field(
        description="The median of the last jobs on that hardware with the same task, methods and limits."
    )


class JobPage(View):
    """A page of jobs, newest first. `next` is the cursor of the page after it, null on the last."""

    items: tuple[JobSummary, ...]
    next: str | None


class TrialView(View):
    """A trial; `measurement` is null until it has ended."""

    id: str
    job_id: str
    number: int
    origin: Origin
    state: TaskState
    outcome: Outcome | None
    attempt: int = Field(description="How often a worker has started it.")
    progress: str | None = Field(examples=["timing"])
    worker_id: str | None
    started_at: float | None
    finished_at: float | None
    configuration: Configuration
    measurement: Measurement | None


class ListedTrial(TrialView):
    """A trial in its job's list."""

    fastest: bool = Field(description="Whether it is the best of the job's trials by the job's objective.")


class LoggedTrial(TrialView):
    """A single trial, with the end of what its process has printed, which grows while the trial runs."""

    log: str | None


class TrialList(View):
    """A job's trials by number."""

    items: tuple[ListedTrial, ...]


class EventView(View):
    """Something that happened to a job. `seq` rises with every event of the control plane."""

    seq: int
    at: float
    kind: str = Field(examples=["started"])
    data: dict[str, Any] = Field(examples=[{"worker": "cpu0-1f2e3d4c"}])


class EventList(View):
    """A job's events, oldest first."""

    items: tuple[EventView, ...]


class CurvePoint(View):
    """A batch size that was probed or timed. Bytes are those of its worst-case step."""

    phase: ProbePhase
    micro_batch_size: int
    fits: bool = Field(description="False when it ran out of memory.")
    peak_bytes: int | None
    reserved_bytes: int | None
    worst_case_step_seconds: float | None
    tokens_per_second: float | None = Field(description="null where the work unit was not timed.")


class Waterfall(View):
    """How the speed-up comes about, lever by lever, the largest first.

    Each lever is taken back by itself, all others as in the best configuration. Levers work together, so that the
    factors' product is not the speed-up; `together` is what is left of it.
    """

    levers: dict[str, str]
    method: Method
    speedup: float | None = Field(
        description="The baseline's seconds over the best's: of the verification's blocks where all factors are of "
        "blocks, else of single trials. With the objective memory, its peak bytes over the best's."
    )
    contributions: tuple[Contribution, ...]
    together: float | None = Field(
        description="The speed-up over the product of all factors; null if one is missing, or some are of trials only."
    )


class ParetoPoint(View):
    """A configuration that no other beats in both tokens/s and memory."""

    trial: int = Field(description="The trial's number.")
    levers: dict[str, str]
    method: Method
    micro_batch_size: int
    tokens_per_second: float
    peak_bytes: int


class Pareto(View):
    """The trials worth choosing between: from the fastest to the one that takes the least memory."""

    points: tuple[ParetoPoint, ...]


class MemoryCurve(View):
    """Memory and speed by batch size, for the best configuration so far."""

    levers: dict[str, str]
    method: Method
    capacity_bytes: int | None
    line: MemoryLine | None
    largest_micro_batch: int | None
    limited_by: str | None
    recommended_micro_batch: int | None
    evaluation_batch_size: int | None
    points: tuple[CurvePoint, ...]


class WorkerView(View):
    """A worker process and its device. `alive` means that it gave a sign of life in the last 30 seconds."""

    id: str = Field(examples=["cpu0-1f2e3d4c"])
    pid: int
    alive: bool
    state: WorkerState
    draining: bool = Field(default=False, description="It takes no further task, and ends after its present one.")
    task_id: str | None
    seen_at: float
    started_at: float
    fingerprint: str
    facts: HardwareFacts


class WorkerList(View):
    """All known workers, in the order in which they started."""

    items: tuple[WorkerView, ...]


class Availability(View):
    """Whether a worker can take a choice or a method; `why_not` is one sentence when it cannot."""

    available: bool
    why_not: str | None


class ChoiceView(View):
    """One way to set a lever. `workers` tells for each living worker whether it can use this choice."""

    name: str
    summary: str
    searched: bool
    changes_numerics: bool
    changes_order: bool
    changes_learning: bool
    needs: tuple[str, ...]
    workers: dict[str, Availability]


class LeverView(View):
    """One dimension of the search."""

    name: str
    summary: str
    source: str
    baseline: str
    choices: tuple[ChoiceView, ...]


class MethodView(View):
    """A finetuning method, and for each living worker whether it can run it."""

    name: str
    workers: dict[str, Availability]


class ExclusionView(View):
    """A combination that is never tried: each lever or circumstance in `when` has one of the values given for it."""

    when: dict[str, tuple[str, ...]]
    reason: str
    reference: str


class Catalogue(View):
    """Everything that can be searched, and which parts of it each living worker can run."""

    levers: tuple[LeverView, ...]
    methods: tuple[MethodView, ...]
    tasks: tuple[str, ...]
    exclusions: tuple[ExclusionView, ...]


class EstimateState(View):
    """The answer to a request for an estimate: its id and its state."""

    id: str
    state: EstimateStatus


class EstimateView(EstimateState):
    """An estimate: `result` once it is done, `error` when it failed."""

    result: Estimate | None
    error: str | None


class Upload(View):
    """A dataset that was sent: `source` is what a job names it by."""

    source: str = Field(examples=["upload:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08.jsonl"])
    sha256: str
    bytes: int


class Health(View):
    """The process is alive."""

    status: Literal["ok"] = "ok"


class Readiness(Health):
    """Jobs can be queued: the database answers and has room; and how many workers live to run them."""

    workers_alive: int
    note: str | None = None


class Problem(View):
    """Any answer that is not a success (RFC 9457). `code` is stable; `errors` point into the request's body."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: tuple[dict[str, str], ...] | None = None

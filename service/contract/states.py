"""Enums of the states of jobs, tasks, estimates and workers, of where a trial comes from, and of what a probe runs."""

from __future__ import annotations

from enum import StrEnum


class JobStatus(StrEnum):
    """Where a job stands. `succeeded`, `failed` and `cancelled` are final."""

    queued = "queued"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self not in (JobStatus.queued, JobStatus.running)


class JobPhase(StrEnum):
    """What a job is doing, in the order in which a job goes through them."""

    queued = "queued"
    baseline = "baseline"
    searching = "searching"
    verifying = "verifying"
    done = "done"


class TaskState(StrEnum):
    """Where a task of the queue stands. `done` and `cancelled` are final; a failed estimate is `done` with an error."""

    queued = "queued"
    running = "running"
    done = "done"
    cancelled = "cancelled"


class EstimateStatus(StrEnum):
    """Where an estimate stands. `done`, `failed` and `cancelled` are final."""

    queued = "queued"
    running = "running"
    done = "done"
    failed = "failed"
    cancelled = "cancelled"


class WorkerState(StrEnum):
    """What a worker does, as far as the queue has heard."""

    idle = "idle"
    busy = "busy"


class Origin(StrEnum):
    """Which part of the search asked for a trial. `recipe` is of jobs of earlier versions."""

    baseline = "baseline"
    recipe = "recipe"
    search = "search"
    ablation = "ablation"
    repeat = "repeat"


class ProbePhase(StrEnum):
    """What a memory probe ran: an eager training step, a compiled one, or an evaluation batch."""

    training = "training"
    compiled = "compiled"
    evaluation = "evaluation"

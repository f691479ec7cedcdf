"""The tables. Times are seconds since 1970 (UTC) as doubles, which SQLite and PostgreSQL compare alike.

States and kinds are stored by name, and read as members of their enums.
"""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import (
    JSON,
    Enum,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from service.contract.measurement import Outcome
from service.contract.states import JobPhase, JobStatus, TaskState
from service.contract.task import TaskKind, Wish

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


NULLABLE_JSON = JSON(none_as_null=True)  # None is NULL, which conditions find, and not JSON's null


class Base(DeclarativeBase):
    """The base of all tables. Every constraint gets a name by which migrations can change it."""

    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {
        dict[str, Any]: NULLABLE_JSON,
        float: Float(53),
        JobStatus: Enum(JobStatus, native_enum=False, length=16),
        JobPhase: Enum(JobPhase, native_enum=False, length=16),
        Wish: Enum(Wish, native_enum=False, length=8),
        TaskKind: Enum(TaskKind, native_enum=False, length=8),
        TaskState: Enum(TaskState, native_enum=False, length=12),
        Outcome: Enum(Outcome, native_enum=False, length=16),
    }


class Job(Base):
    """A finetuning job. `history_version` counts the trials and verifications that have ended.

    `recommendation` is the best so far, written when a trial or verification ends, and the final one once the job has.
    `owner` is the owner of the API key that submitted it, and NULL where the API asks for no keys.
    """

    __tablename__ = "jobs"
    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    spec: Mapped[dict[str, Any]]
    status: Mapped[JobStatus]
    phase: Mapped[JobPhase] = mapped_column(default=JobPhase.queued)
    wish: Mapped[Wish | None]
    error: Mapped[str | None] = mapped_column(Text)
    fingerprint: Mapped[str | None] = mapped_column(String(16))
    facts: Mapped[dict[str, Any] | None]
    history_version: Mapped[int] = mapped_column(Integer, default=0)
    planned_trials: Mapped[int | None] = mapped_column(Integer)
    notes: Mapped[list[str] | None] = mapped_column(NULLABLE_JSON)
    recommendation: Mapped[dict[str, Any] | None]
    owner: Mapped[str | None] = mapped_column(String(100))
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    __table_args__ = (
        Index("ix_jobs_status_seq", "status", "seq"),
        Index("ix_jobs_owner_seq", "owner", "seq"),
        Index("ix_jobs_finished_at", "finished_at"),
        Index("ix_jobs_created_at", "created_at"),
    )


class JobLabel(Base):
    """A label of a job. Labels have rows of their own, so that both databases can filter jobs by them."""

    __tablename__ = "job_labels"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    value: Mapped[str] = mapped_column(String(200))
    __table_args__ = (Index("ix_job_labels_key_value", "key", "value"),)


class Submission(Base):
    """A submission under an Idempotency-Key: which job it made, and a digest of its body."""

    __tablename__ = "submissions"
    owner: Mapped[str] = mapped_column(String(100), primary_key=True)
    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[float]
    __table_args__ = (Index("ix_submissions_job_id", "job_id"),)


class ApiKey(Base):
    """An API key: the digest of its secret, whose jobs it may see, and what it may do."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(100))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    most_open_jobs: Mapped[int | None] = mapped_column(Integer)
    created_at: Mapped[float]
    used_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class Task(Base):
    """A piece of work that a worker leases: a part of a job, or an estimate, which belongs to no job.

    `attempt` is the fencing token, which rises at every claim. `error` says why an estimate failed; of other tasks,
    the job has the error. Tasks are claimed by `rank`, then by `place`, the time of the job's submission less what its
    priority is worth. `owner` is of an estimate, as jobs have their own. After a worker's death a task waits until
    `not_before`.
    """

    __tablename__ = "tasks"
    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    kind: Mapped[TaskKind]
    state: Mapped[TaskState] = mapped_column(default=TaskState.queued)
    rank: Mapped[int] = mapped_column(Integer, default=1)
    owner: Mapped[str | None] = mapped_column(String(100))
    place: Mapped[float]
    not_before: Mapped[float | None]
    number: Mapped[int] = mapped_column(Integer, default=0)
    key: Mapped[str | None] = mapped_column(String(32))
    payload: Mapped[dict[str, Any]]
    result: Mapped[dict[str, Any] | None]
    outcome: Mapped[Outcome | None]
    error: Mapped[str | None] = mapped_column(Text)
    log: Mapped[str | None] = mapped_column(Text, deferred=True)  # long, and read of one task only
    progress: Mapped[str | None] = mapped_column(String(200))
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    deaths: Mapped[int] = mapped_column(Integer, default=0)
    worker_id: Mapped[str | None] = mapped_column(String(32))
    lease_until: Mapped[float | None]
    base_version: Mapped[int] = mapped_column(Integer, default=0)
    finish_order: Mapped[int | None] = mapped_column(Integer)
    need: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    __table_args__ = (
        UniqueConstraint("job_id", "kind", "key"),
        Index("ix_tasks_job_id_kind_finish_order", "job_id", "kind", "finish_order"),
        Index(
            "ix_tasks_claimable",
            "need",
            "kind",
            "rank",
            "place",
            "seq",
            sqlite_where=text("state = 'queued'"),
            postgresql_where=text("state = 'queued'"),
        ),
        Index(
            "ix_tasks_leased",
            "lease_until",
            sqlite_where=text("state = 'running'"),
            postgresql_where=text("state = 'running'"),
        ),
        Index(
            "uq_tasks_one_open_plan",
            "job_id",
            unique=True,
            sqlite_where=text("kind = 'plan' AND state IN ('queued', 'running')"),
            postgresql_where=text("kind = 'plan' AND state IN ('queued', 'running')"),
        ),
    )


class Need(Base):
    """What tasks need of a worker's hardware. Tasks of the same needs share a row, by a digest of it.

    A claim looks at each need once, so that it costs the same however many tasks wait for hardware that is not there.
    """

    __tablename__ = "needs"
    key: Mapped[str] = mapped_column(String(16), primary_key=True)
    device: Mapped[str | None] = mapped_column(String(20))
    name: Mapped[str | None] = mapped_column(String(200))
    bytes: Mapped[float | None]
    fingerprint: Mapped[str | None] = mapped_column(String(16))


class Event(Base):
    """Something that happened to a job; `seq` rises in the order in which events happened."""

    __tablename__ = "events"
    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(32))
    data: Mapped[dict[str, Any]]
    __table_args__ = (Index("ix_events_job_id_seq", "job_id", "seq"),)


class Webhook(Base):
    """A URL that is told when jobs end: those of the owner `sees`, or all jobs where it is NULL."""

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    url: Mapped[str] = mapped_column(Text)
    owner: Mapped[str | None] = mapped_column(String(100))
    sees: Mapped[str | None] = mapped_column(String(100))
    created_at: Mapped[float]
    disabled_at: Mapped[float | None]


class Delivery(Base):
    """A message to a webhook. It is sent at `due_at`, which is NULL once it was delivered or given up."""

    __tablename__ = "deliveries"
    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    message_id: Mapped[str] = mapped_column(String(32))
    body: Mapped[str] = mapped_column(Text)
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    due_at: Mapped[float | None]
    tried_at: Mapped[float | None]
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float]
    __table_args__ = (
        Index("ix_deliveries_webhook_id_tried_at", "webhook_id", "tried_at"),
        Index("ix_deliveries_due_at", "due_at"),
    )


class Worker(Base):
    """A worker process and its device. The worker counts as alive while `seen_at` is recent.

    One that is `draining` gets no further tasks, and ends once its present task has.
    """

    __tablename__ = "workers"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    pid: Mapped[int] = mapped_column(Integer)
    facts: Mapped[dict[str, Any]]
    fingerprint: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(12), default="idle")
    task_id: Mapped[str | None] = mapped_column(String(32))
    draining: Mapped[bool] = mapped_column(default=False)
    started_at: Mapped[float]
    seen_at: Mapped[float]


# For statements that read or write columns and need no objects, which take a third of the time.
JOBS, TASKS, WORKERS = cast("tuple[Table, Table, Table]", (Job.__table__, Task.__table__, Worker.__table__))

"""The tables. Times are seconds since 1970 (UTC) as doubles, so that both databases compare them alike."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Float, ForeignKey, Index, Integer, MetaData, String, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """All tables, with a name for every constraint so that migrations can speak of them."""

    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {dict[str, Any]: JSON, float: Float(53)}


class Job(Base):
    """A finetuning job. `history_version` counts what its plan has to take into account."""

    __tablename__ = "jobs"
    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    spec: Mapped[dict[str, Any]]
    status: Mapped[str] = mapped_column(String(16))
    phase: Mapped[str] = mapped_column(String(16), default="queued")
    wish: Mapped[str | None] = mapped_column(String(8))
    error: Mapped[str | None] = mapped_column(Text)
    fingerprint: Mapped[str | None] = mapped_column(String(16))
    facts: Mapped[dict[str, Any] | None]
    history_version: Mapped[int] = mapped_column(Integer, default=0)
    planned_trials: Mapped[int | None] = mapped_column(Integer)
    notes: Mapped[list[str] | None] = mapped_column(JSON)
    recommendation: Mapped[dict[str, Any] | None]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    __table_args__ = (Index("ix_jobs_status_seq", "status", "seq"),)


class JobLabel(Base):
    """A label of a job, a row each so that it can be filtered by on both databases."""

    __tablename__ = "job_labels"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    value: Mapped[str] = mapped_column(String(200))
    __table_args__ = (Index("ix_job_labels_key_value", "key", "value"),)


class Task(Base):
    """A leasable piece of a job. `attempt` is the fence: it rises at every claim."""

    __tablename__ = "tasks"
    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(8))
    state: Mapped[str] = mapped_column(String(12), default="queued")
    rank: Mapped[int] = mapped_column(Integer, default=1)
    job_seq: Mapped[int] = mapped_column(Integer)
    number: Mapped[int] = mapped_column(Integer, default=0)
    key: Mapped[str | None] = mapped_column(String(32))
    payload: Mapped[dict[str, Any]]
    result: Mapped[dict[str, Any] | None]
    outcome: Mapped[str | None] = mapped_column(String(16))
    log: Mapped[str | None] = mapped_column(Text)
    progress: Mapped[str | None] = mapped_column(String(200))
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    deaths: Mapped[int] = mapped_column(Integer, default=0)
    worker_id: Mapped[str | None] = mapped_column(String(32))
    lease_until: Mapped[float | None]
    base_version: Mapped[int] = mapped_column(Integer, default=0)
    finish_order: Mapped[int | None] = mapped_column(Integer)
    need_device: Mapped[str | None] = mapped_column(String(8))
    need_name: Mapped[str | None] = mapped_column(String(200))
    need_bytes: Mapped[float | None]
    fingerprint: Mapped[str | None] = mapped_column(String(16))
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    __table_args__ = (
        UniqueConstraint("job_id", "kind", "key"),
        Index("ix_tasks_job_id_kind_finish_order", "job_id", "kind", "finish_order"),
        Index(
            "ix_tasks_claimable",
            "rank",
            "job_seq",
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


class Event(Base):
    """Something that happened to a job, in the order it happened."""

    __tablename__ = "events"
    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(32))
    data: Mapped[dict[str, Any]]
    __table_args__ = (Index("ix_events_job_id_seq", "job_id", "seq"),)


class EstimateRow(Base):
    """A question for the memory a job would need, and its answer."""

    __tablename__ = "estimates"
    seq: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    request: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(12), default="queued")
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    worker_id: Mapped[str | None] = mapped_column(String(32))
    lease_until: Mapped[float | None]
    result: Mapped[dict[str, Any] | None]
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float]
    __table_args__ = (
        Index(
            "ix_estimates_open",
            "seq",
            sqlite_where=text("state IN ('queued', 'running')"),
            postgresql_where=text("state IN ('queued', 'running')"),
        ),
    )


class Worker(Base):
    """A worker process and its device. Alive while `seen_at` is recent."""

    __tablename__ = "workers"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    pid: Mapped[int] = mapped_column(Integer)
    facts: Mapped[dict[str, Any]]
    fingerprint: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(12), default="idle")
    task_id: Mapped[str | None] = mapped_column(String(32))
    started_at: Mapped[float]
    seen_at: Mapped[float]

"""Metrics for Prometheus: of this process's requests, and of the queue, which is read when they are asked for."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from sqlalchemy import Engine, case, func, select
from sqlalchemy.orm import Session

from service import jobs
from service.contract.states import TaskState
from service.contract.task import TaskKind
from service.counters import OWN
from service.db import now, reading
from service.models import Job, Task

LATELY_SECONDS = 3600.0  # of which claims' waiting times are told
KEPT_SECONDS = 10.0  # less than Prometheus usually waits between two scrapes
LAST_ANSWERS = 100  # of which the best speed-up is told


class QueueMetrics(Collector):
    """The state of the queue, as the database has it at the time of asking."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metrics (the interface of prometheus_client)."""
        with reading(self._engine) as session:
            at = now(session)
            yield from _tasks(session, at)
            yield from _jobs(session)
            alive = GaugeMetricFamily("dynotune_workers_alive", "Workers that gave a sign of life lately.")
            alive.add_metric((), jobs.workers_alive(session, at))
            yield alive


def _tasks(session: Session, at: float) -> Iterator[GaugeMetricFamily]:
    waiting = GaugeMetricFamily("dynotune_tasks_queued", "Tasks that wait for a worker.", labels=("kind",))
    oldest = GaugeMetricFamily("dynotune_oldest_task_seconds", "Age of the task that waits longest.", labels=("kind",))
    queued = select(Task.kind, func.count(), func.min(Task.created_at)).where(Task.state == TaskState.queued)
    for kind, count, first in session.execute(queued.group_by(Task.kind)):
        waiting.add_metric((kind,), count)
        oldest.add_metric((kind,), at - first)
    lag = GaugeMetricFamily("dynotune_claim_seconds", "Mean wait of the last hour's claimed tasks.", labels=("kind",))
    claimed = select(Task.kind, func.avg(Task.started_at - Task.created_at)).where(
        Task.started_at > at - LATELY_SECONDS
    )
    for kind, seconds in session.execute(claimed.group_by(Task.kind)):
        lag.add_metric((kind,), seconds)
    ended = GaugeMetricFamily("dynotune_outcomes", "Ended tasks of the jobs that are kept.", labels=("kind", "outcome"))
    device = GaugeMetricFamily("dynotune_device_seconds", "Device time of the jobs that are kept.", labels=("kind",))
    taken: dict[TaskKind, float] = {}
    done = select(
        Task.kind,
        Task.outcome,
        func.count(),
        func.sum(case((Task.finished_at > Task.started_at, Task.finished_at - Task.started_at), else_=0.0)),
    ).where(Task.outcome.is_not(None), Task.kind.in_((TaskKind.trial, TaskKind.verify)))
    for kind, outcome, count, seconds in session.execute(done.group_by(Task.kind, Task.outcome)):
        ended.add_metric((kind, str(outcome)), count)
        taken[kind] = taken.get(kind, 0.0) + (seconds or 0.0)
    for kind, seconds in taken.items():
        device.add_metric((kind,), seconds)
    lost = GaugeMetricFamily("dynotune_lease_losses", "Deaths of workers in the jobs that are kept.")
    lost.add_metric((), session.scalar(select(func.sum(Task.deaths))) or 0)
    yield from (waiting, oldest, lag, ended, device, lost)


def _jobs(session: Session) -> Iterator[GaugeMetricFamily]:
    states = GaugeMetricFamily("dynotune_jobs", "Jobs by status.", labels=("status",))
    for status, count in session.execute(select(Job.status, func.count()).group_by(Job.status)):
        states.add_metric((status,), count)
    yield states
    answers = session.scalars(
        select(Job.recommendation)
        .where(Job.finished_at.is_not(None), Job.recommendation.is_not(None))
        .order_by(Job.seq.desc())
        .limit(LAST_ANSWERS)
    )
    speedups = [(one.get("evidence") or {}).get("speedup") for one in answers if one]  # also another version's
    best = GaugeMetricFamily("dynotune_best_speedup", f"Largest speed-up of the last {LAST_ANSWERS} answers.")
    best.add_metric((), max((one for one in speedups if one is not None), default=0.0))
    yield best


class Metrics:
    """The metrics' text, of which the queue's part is made anew every KEPT_SECONDS at most, once for all who ask.

    Counting all tasks takes seconds where there are a million: many who ask at once would keep the database busy.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(QueueMetrics(engine))
        self._clock, self._lock = clock, threading.Lock()
        self._made, self._text = -math.inf, b""

    def __call__(self) -> bytes:
        """All metrics in Prometheus' text format."""
        # Who asks while another counts gets the last text, and waits only where there is none yet.
        if self._clock() - self._made >= KEPT_SECONDS and self._lock.acquire(blocking=not self._text):
            try:
                if self._clock() - self._made >= KEPT_SECONDS:
                    self._text, self._made = generate_latest(self._registry), self._clock()
            finally:
                self._lock.release()
        return generate_latest(OWN) + self._text

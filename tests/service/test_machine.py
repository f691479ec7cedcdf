"""The queue against a model of it: any order of calls, by any worker, at any time (Hypothesis' stateful testing).

`make chaos` runs many more steps than `make test` (DYNOTUNE_CHAOS=1).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.states import Origin, TaskState
from service.contract.task import Claim, PlanClaim, PlanDecision, TaskKind, TrialClaim, TrialRequest
from service.db import connect, upgrade
from service.errors import Drained, LeaseLost, NotFound, NotYet
from service.models import Job, Task
from service.queue import Queue
from tests.factory import configuration, measured

LONG = os.environ.get("DYNOTUNE_CHAOS") == "1"
EXAMPLES, STEPS = (125, 50) if LONG else (15, 40)
LEASE_SECONDS = 30.0
KINDS = (TaskKind.plan, TaskKind.trial)
WORKERS = st.sampled_from(("a", "b", "c"))
JOB = {"model": {"source": "m"}, "dataset": {"source": "d"}}
FACTS = HardwareFacts(
    host="h",
    device="cpu",
    name="c",
    memory_bytes=1 << 33,
    cores=2,
    bf16_native=False,
    versions={"torch": "x"},
    packages={},
)


@cache
def migrated() -> Path:
    """A database with its tables, to be copied."""
    file = Path(tempfile.mkdtemp()) / "template.db"
    upgrade(f"sqlite:///{file}")
    connect(f"sqlite:///{file}").dispose()
    return file


class QueueMachine(RuleBasedStateMachine):
    """Calls of users and workers. `held` is what each worker believes it holds, `until` when each lease ends."""

    jobs: Bundle[str] = Bundle("jobs")
    claims: Bundle[tuple[Claim, str]] = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        shutil.copy(migrated(), self.folder / "q.db")
        self.engine = connect(f"sqlite:///{self.folder / 'q.db'}")
        self.now = 1000.0
        self.queue = Queue(self.engine, clock=lambda: self.now, lease_seconds=LEASE_SECONDS, retry_seconds=4.0)
        self.until: dict[str, tuple[int, float]] = {}  # task -> the attempt that holds it, and the end of its lease
        self.ended: set[str] = set()
        self.deleted: set[str] = set()
        self.finished: dict[str, int] = {}  # job -> its trials that have ended
        self.number = 0
        self.drained: set[str] = set()

    def teardown(self) -> None:
        """Remove the database."""
        self.engine.dispose()
        shutil.rmtree(self.folder)

    @initialize()
    def workers(self) -> None:
        """Three workers of the same hardware."""
        for name in ("a", "b", "c"):
            self.queue.register(name, 1, FACTS)

    @rule(target=jobs, priority=st.integers(-2, 2))
    def submit(self, priority: int) -> str:
        """A user submits a job."""
        job_id = self.queue.submit(JobSpec.model_validate(JOB | {"priority": priority}))
        self.finished[job_id] = 0
        return job_id

    @rule(target=claims, worker=WORKERS)
    def claim(self, worker: str) -> Any:
        """A worker asks for work: what it gets, nobody holds."""
        try:
            claim = self.queue.claim(worker, KINDS)
        except Drained:
            assert worker in self.drained
            return multiple()
        assert worker not in self.drained
        if claim is None:
            return multiple()
        assert not isinstance(claim, PlanClaim | TrialClaim) or claim.job_id not in self.ended
        attempt, until = self.until.get(claim.task_id, (0, 0.0))
        assert claim.attempt > attempt and until == 0.0, "two workers hold one task"
        self.until[claim.task_id] = (claim.attempt, self.now + LEASE_SECONDS)
        return claim, worker

    def holds(self, claim: Claim) -> bool:
        """Whether the model says that the claim's lease is still valid: nobody has reaped it or ended its job."""
        return self.until.get(claim.task_id, (0, 0.0))[0] == claim.attempt and self.until[claim.task_id][1] > 0.0

    def written(self, claim: Claim, call: Any, ends: bool = True) -> bool:
        """Whether a worker's write was accepted, which is so exactly where the model says that it holds the lease."""
        try:
            call()
        except LeaseLost:
            assert not self.holds(claim), "a valid lease was refused"
            return False
        assert self.holds(claim), "a write without a lease was accepted"
        if ends:
            self.until[claim.task_id] = (claim.attempt, 0.0)
        return True

    @rule(held=consumes(claims), trials=st.integers(0, 2), finish=st.booleans())
    def finish_a_plan_or_trial(self, held: tuple[Claim, str], trials: int, finish: bool) -> None:
        """A worker writes its result."""
        claim = held[0]
        if isinstance(claim, PlanClaim):
            requests = []
            for _ in range(0 if finish else trials):
                self.number += 1
                made = configuration(effective=8 * self.number)
                requests.append(TrialRequest(configuration=made, origin=Origin.search, number=self.number))
            decision = PlanDecision(trials=tuple(requests), finish=finish, error="over" if finish else None)
            if self.written(claim, lambda: self.queue.finish_plan(claim, decision)) and finish:
                with Session(self.engine) as session:
                    if session.scalars(select(Job).where(Job.id == claim.job_id)).one().status.ended:
                        self.end(claim.job_id)
        elif isinstance(claim, TrialClaim):
            one = measured(claim.request.configuration, 1.0)
            if self.written(claim, lambda: self.queue.finish_trial(claim, one, "")):
                self.finished[claim.job_id] += 1

    @rule(held=claims)
    def renew(self, held: tuple[Claim, str]) -> None:
        """A worker goes on."""
        claim = held[0]
        if self.written(claim, lambda: self.queue.renew(claim, "going on"), ends=False):
            self.until[claim.task_id] = (claim.attempt, self.now + LEASE_SECONDS)

    @rule(held=consumes(claims))
    def release(self, held: tuple[Claim, str]) -> None:
        """A worker hands a task back."""
        self.written(held[0], lambda: self.queue.release(held[0]))

    @rule(held=consumes(claims))
    def fail(self, held: tuple[Claim, str]) -> None:
        """A worker cannot do a task."""
        claim = held[0]
        if self.written(claim, lambda: self.queue.fail(claim, "why")) and isinstance(claim, PlanClaim | TrialClaim):
            self.end(claim.job_id)

    @rule(seconds=st.sampled_from((1.0, 5.0, 20.0, 40.0)))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    @rule()
    def reap(self) -> None:
        """The reaper takes every lease that has run out, and no other."""
        self.queue.reap()
        for task, (attempt, until) in self.until.items():
            if 0.0 < until < self.now:
                self.until[task] = (attempt + 1, 0.0)
        with Session(self.engine) as session:  # a job may have ended by a task that ended three workers
            for job in session.scalars(select(Job)):
                if job.status.ended:
                    self.end(job.id)
                self.finished[job.id] = job.history_version

    @rule(target=claims, worker=WORKERS)
    def take_over(self, worker: str) -> Any:
        """All workers fall silent for longer than a lease, and one of them asks for work; the others are only slow."""
        self.wait(100.0)
        self.reap()
        self.wait(10.0)
        return self.claim(worker)

    @rule(job=jobs, stop=st.booleans())
    def cancel_or_stop(self, job: str, stop: bool) -> None:
        """A user ends a job."""
        try:
            if stop:
                self.queue.stop(job)
            else:
                self.queue.cancel(job)
        except NotFound:
            assert job in self.deleted
        except NotYet:
            assert job in self.ended
        else:
            self.end(job)

    @rule(job=jobs)
    def delete(self, job: str) -> None:
        """A user deletes a job."""
        try:
            self.queue.delete(job)
        except NotFound:
            assert job in self.deleted
        except NotYet:
            assert job not in self.ended
        else:
            assert job in self.ended
            self.deleted.add(job)
            with Session(self.engine) as session:
                there = set(session.scalars(select(Task.id)))
            for task, (attempt, _) in self.until.items():
                if task not in there:
                    self.until[task] = (attempt, 0.0)

    @rule(worker=WORKERS)
    def drain(self, worker: str) -> None:
        """An operator drains a worker, but never all of them."""
        if len(self.drained | {worker}) < 3:
            self.queue.drain(worker)
            self.drained.add(worker)

    def end(self, job: str) -> None:
        """The model's job has ended."""
        self.ended.add(job)

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every open job has an open task, an ended one none that waits, and its history has no gaps."""
        with Session(self.engine) as session:
            for job in session.scalars(select(Job)):
                tasks = session.scalars(select(Task).where(Task.job_id == job.id)).all()
                waiting = [one for one in tasks if one.state is TaskState.queued]
                running = [one for one in tasks if one.state is TaskState.running]
                done = sorted(one.finish_order for one in tasks if one.finish_order is not None)
                assert job.status.ended == (job.id in self.ended)
                assert done == list(range(1, job.history_version + 1)) and len(done) == self.finished[job.id]
                assert not (job.status.ended and waiting)
                assert job.status.ended or waiting or running or self.planned_nothing(tasks)
                for one in running:
                    assert self.until[one.id] == (one.attempt, one.lease_until)

    @staticmethod
    def planned_nothing(tasks: Any) -> bool:
        """A plan decided nothing: real ones never do, and the machine's may."""
        return any(one.kind is TaskKind.plan and one.state is TaskState.done for one in tasks)


QueueMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    database=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(1200)
class TestQueueMachine(QueueMachine.TestCase):  # type: ignore[name-defined,misc,valid-type]
    """The machine, as pytest finds it."""

"""The worker's loop: it claims a task, does it while its lease is renewed, and records the result. No torch in here."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from service.broker import Broker, BrokerUnavailable
from service.contract.task import Claim, TaskKind
from service.errors import LeaseLost
from worker.runner.estimating import answer
from worker.runner.lease import Lease
from worker.runner.lock import DeviceLock
from worker.runner.measuring import Bench, JobFailed, free_disk_problem, measure
from worker.runner.pruning import prune
from worker.runner.verifying import Verifier

IDLE_SECONDS = (0.2, 2.0)
REAP_SECONDS = 5.0
PRUNE_SECONDS = 3600.0
TURN_SECONDS = 1.0
OFF_DEVICE = (TaskKind.plan, TaskKind.estimate)
ON_DEVICE = (TaskKind.trial, TaskKind.verify)

Answer = TypeVar("Answer")


@dataclass
class Loop:
    """One worker on one device. `stop` asks it to go: now, or once the task in hand has ended (`drain`)."""

    broker: Broker
    worker_id: str
    bench: Bench
    lock: DeviceLock
    least_free_disk: int

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._now = threading.Event()
        self._lease: Lease | None = None
        self._reaped = 0.0
        self._pruned = -PRUNE_SECONDS

    def stop(self, now: bool = False) -> None:
        """End after the task in hand; `now`, or the second time, hand it back unfinished."""
        if now or self._stopping.is_set():
            self._now.set()
            if self._lease is not None:
                self._lease.end()
        self._stopping.set()

    def run(self) -> None:
        """Work until stopped. A queue that does not answer is waited for, and a lost lease drops the result."""
        idle = IDLE_SECONDS[0]
        while not self._stopping.is_set():
            try:
                worked = self._once()
            except BrokerUnavailable:
                worked = False
            except LeaseLost:
                worked = True
            idle = IDLE_SECONDS[0] if worked else min(idle * 1.6, IDLE_SECONDS[1])
            if not worked:
                self._stopping.wait(idle * random.uniform(0.7, 1.3))
        self.lock.release()
        self.lock.stop_waiting()

    def _once(self) -> bool:
        """Claim and do one task; False when there was none."""
        if time.monotonic() - self._reaped > REAP_SECONDS:
            self.broker.register(self.worker_id, os.getpid(), self.bench.facts)  # a forgotten worker comes back
            self.broker.reap()
            self._reaped = time.monotonic()
        if time.monotonic() - self._pruned > PRUNE_SECONDS:
            prune(self.bench.home)
            self._pruned = time.monotonic()
        claim = self.broker.claim(self.worker_id, OFF_DEVICE)
        if claim is not None:
            self._work(claim)
            return True
        # The device first, then the task: whoever holds a trial may measure at once.
        if not self.lock.acquire():
            return False
        try:
            claim = self.broker.claim(self.worker_id, ON_DEVICE)
            if claim is None:
                return False
            self._work(claim)
        finally:
            self.lock.release()
        if self.lock.awaited():
            self._take_turns()
        return True

    def _take_turns(self) -> None:
        """Somebody else waits for the device: plan for them, and leave them time to take it."""
        until = time.monotonic() + TURN_SECONDS
        while time.monotonic() < until and not self._stopping.is_set():
            claim = self.broker.claim(self.worker_id, (TaskKind.plan,))
            if claim is not None:
                self._work(claim)
            self._stopping.wait(0.1)

    def _work(self, claim: Claim) -> None:
        """Do a claimed task with its lease renewed meanwhile; a task that fails ends with its reason."""
        with Lease(self.broker, claim) as lease:
            self._lease = lease
            if self._now.is_set():
                lease.end()
            try:
                self._run(claim, lease)
            except JobFailed as error:
                self._fail(claim, str(error), error.log)
            except (BrokerUnavailable, LeaseLost):
                raise
            except Exception as error:  # noqa: BLE001 - a mistake of ours ends this task, not the worker
                log = traceback.format_exc()
                sys.stderr.write(log)
                text = f"The worker failed: {type(error).__name__}: {str(error)[:300]}; its log says where."
                self._fail(claim, text, log)
            finally:
                self._lease = None

    def _run(self, claim: Claim, lease: Lease) -> None:
        """Do the task and record its result; hand it back where it was ended from outside."""
        record = self._done(claim, lease)
        if record is not None:
            self._persist(record)
        elif lease.failure is not None:
            raise lease.failure
        elif not lease.lost:
            self._persist(lambda: self.broker.release(claim))

    def _done(self, claim: Claim, lease: Lease) -> Callable[[], None] | None:
        """Do the task; what records its result, or None when it was ended from outside."""
        broker, ended = self.broker, lease.over.is_set
        if claim.kind is TaskKind.plan:
            from worker.plan import plan  # Optuna, which takes a second to import

            decision = plan(self._persist(lambda: broker.plan_input(claim)))
            return lambda: broker.finish_plan(claim, decision)
        if claim.kind is TaskKind.estimate:
            estimate = answer(self.bench, claim, lease.show, ended)
            return None if estimate is None else lambda: broker.finish_estimate(claim, estimate)
        if (problem := free_disk_problem(self.bench.home, self.least_free_disk)) is not None:
            raise JobFailed(problem)
        if claim.kind is TaskKind.trial:
            measurement, log = measure(
                self.bench, claim.spec, claim.job_id, claim.request, lease.show, ended, self.lock.fd
            )
            return None if measurement is None else lambda: broker.finish_trial(claim, measurement, log)
        verifier = Verifier(self.bench, claim.spec, claim.job_id, claim.request, lease.show, ended, self.lock.fd)
        verification = verifier.run()
        return None if verification is None else lambda: broker.finish_verify(claim, verification, verifier.log)

    def _fail(self, claim: Claim, reason: str, log: str) -> None:
        self._persist(lambda: self.broker.fail(claim, reason, log))

    def _persist(self, call: Callable[[], Answer]) -> Answer:
        """Repeat a call until the queue answers, so that an outage costs no result; only the call is repeated."""
        wait = IDLE_SECONDS[0]
        while True:
            try:
                return call()
            except BrokerUnavailable:
                if self._now.wait(wait):
                    raise
                wait = min(wait * 1.6, IDLE_SECONDS[1])

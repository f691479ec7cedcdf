"""The worker's loop: claim, run, finish, with a heartbeat and an ear for wishes. It never imports torch."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy.exc import OperationalError

from service.broker import Broker, LeaseLost
from service.contract.task import Claim, TaskKind, TrialRequest, VerifyRequest
from worker.plan import plan
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
ON_DEVICE = (TaskKind.trial, TaskKind.verify)


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
        """Work until stopped. A database that is away is waited for, and a lost lease drops the result."""
        idle = IDLE_SECONDS[0]
        while not self._stopping.is_set():
            try:
                worked = self._once()
            except OperationalError:
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
        claim = self.broker.claim(self.worker_id, (TaskKind.plan,))
        if claim is not None:
            self._plan(claim)
            return True
        estimate = self.broker.claim_estimate(self.worker_id, self.bench.facts.fingerprint)
        if estimate is not None:
            self._persist(lambda: self.broker.finish_estimate(estimate, *answer(self.bench, estimate)))
            return True
        # The device first, then the task: whoever holds a trial may measure at once.
        if not self.lock.acquire():
            return False
        try:
            claim = self.broker.claim(self.worker_id, ON_DEVICE)
            if claim is None:
                return False
            self._on_device(claim)
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
                self._plan(claim)
            self._stopping.wait(0.1)

    def _plan(self, claim: Claim) -> None:
        known = self.broker.plan_input(claim)
        self.broker.finish_plan(claim, plan(known))

    def _on_device(self, claim: Claim) -> None:
        problem = free_disk_problem(self.bench.home, self.least_free_disk)
        if problem is not None:
            self.broker.fail_job(claim, problem)
            return
        with Lease(self.broker, claim) as lease:
            self._lease = lease
            if self._now.is_set():
                lease.end()
            try:
                self._run(claim, lease)
            except JobFailed as error:
                text, log = str(error), error.log
                self._persist(lambda: self.broker.fail_job(claim, text, log))
            except (OperationalError, LeaseLost):
                raise
            except Exception as error:  # noqa: BLE001 - a mistake of ours ends this job, not the worker
                log = traceback.format_exc()
                sys.stderr.write(log)
                text = f"The worker failed: {type(error).__name__}: {str(error)[:300]}; its log says where."
                self._persist(lambda: self.broker.fail_job(claim, text, log))
            finally:
                self._lease = None

    def _run(self, claim: Claim, lease: Lease) -> None:
        def progress(text: str) -> None:
            lease.progress = text

        if claim.kind is TaskKind.trial:
            trial = TrialRequest.model_validate(claim.payload)
            measurement, log = measure(
                self.bench, claim.spec, claim.job_id, trial, progress, lease.over.is_set, self.lock.fd
            )
            if measurement is not None:
                self._persist(lambda: self.broker.finish_trial(claim, measurement, log))
                return
        else:
            request = VerifyRequest.model_validate(claim.payload)
            verifier = Verifier(
                self.bench, claim.spec, claim.job_id, request, progress, lease.over.is_set, self.lock.fd
            )
            verification = verifier.run()
            if verification is not None:
                self._persist(lambda: self.broker.finish_verify(claim, verification, verifier.log))
                return
        if not lease.lost:
            self._persist(lambda: self.broker.release(claim))

    def _persist(self, write: Callable[[], None]) -> None:
        """Write what minutes of measuring found; a database that is away is waited for while the lease may hold."""
        wait = IDLE_SECONDS[0]
        while True:
            try:
                return write()
            except OperationalError:
                if self._now.wait(wait):
                    raise
                wait = min(wait * 1.6, IDLE_SECONDS[1])

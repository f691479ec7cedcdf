"""The worker's loop: it claims a task, runs it while its lease is renewed, and records the result, without torch."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from service import logs, tracing
from service.broker import Broker
from service.contract.task import Claim, TaskKind
from service.errors import BadUpload, BrokerUnavailable, Drained, LeaseLost, Misconfigured, NotOurs, OtherVersion
from service.patience import Patience
from worker.runner.estimating import answer
from worker.runner.incumbent import Incumbent
from worker.runner.lease import Lease
from worker.runner.lock import DeviceLock
from worker.runner.measuring import Bench, JobFailed, disk_problem, measure
from worker.runner.pruning import prune
from worker.runner.stay import Stay, Terms
from worker.runner.verifying import Verifier

IDLE_SECONDS = (0.2, 2.0)  # the first and the longest pause between two looks at an empty queue
REAP_SECONDS = 5.0  # between two looks for the tasks of dead workers
PRUNE_SECONDS = 3600.0  # between two removals of old caches
REST_SECONDS = 30.0  # after data that did not fit on the disk
USUAL_WAIT = 60.0  # seconds for which another worker may use the device before this one says so
YIELD_SECONDS = 1.0  # how long a worker leaves the device to another that waits for it
OFF_DEVICE = (TaskKind.plan, TaskKind.estimate)
ON_DEVICE = (TaskKind.trial, TaskKind.verify)

Answer = TypeVar("Answer")
log = logs.logger("dynotune.worker")


class TooFull(Exception):
    """A sentence: the disk has too little room to measure."""


class InUse(Exception):
    """A sentence: another process has been using the device for long."""


@dataclass
class Loop:
    """One worker on one device, which works until `stop` is called, or until its stay ends.

    With too little disk it claims nothing to measure until there is more, and says so: a worker that fails what it
    claims is the first to be free again, and would fail all jobs of the queue.
    """

    broker: Broker
    worker_id: str
    bench: Bench
    lock: DeviceLock
    least_free_disk: int
    stay: Stay = field(default_factory=lambda: Stay(Terms()))
    patience: Patience = field(default_factory=Patience)  # with other workers, before their tasks are queued again

    def __post_init__(self) -> None:
        self.told_to_end = False
        self._stopping = threading.Event()
        self._now = threading.Event()
        self._lease: Lease | None = None
        self._reaped = 0.0
        self._pruned = -PRUNE_SECONDS
        self._told = ""
        self._refused_since: float | None = None  # when the device's lock was first refused, if it still is
        self._incumbent = Incumbent(self.bench)
        self._handed_back: set[str] = set()  # tasks whose children were ended by something else
        self._too_large: set[str] = set()  # tasks whose data did not fit on the disk
        # Until when it measures nothing, so that another worker takes what it could not do, and why.
        self._rest: tuple[float, Exception] | None = None

    def stop(self, now: bool = False) -> None:
        """End the loop after the current task; with `now`, or at the second call, hand that task back unfinished.

        A grace period of the worker's stay begins at the first call; the task is handed back at its end.
        """
        if now or self._stopping.is_set():
            self._now.set()
            if self._lease is not None:
                self._lease.end()
        self.told_to_end = True
        self.stay.grace()
        self._stopping.set()

    def run(self) -> None:
        """Work until stopped or drained. While the queue does not answer, wait; drop the result of a lost lease."""
        idle = IDLE_SECONDS[0]
        try:
            while not self._stopping.is_set():
                try:
                    worked = self._once()
                except (BrokerUnavailable, OtherVersion, TooFull, InUse) as error:
                    self._tell(str(error))
                    self._give_up_device()
                    worked = False
                    if isinstance(error, BrokerUnavailable):
                        self.stay.worked()  # as nobody can tell whether a task waits
                        self.patience.begin()
                except LeaseLost:
                    worked = True
                except Drained:
                    break
                else:
                    self._told = ""
                if worked:
                    self.stay.worked()
                if (reason := self.stay.why_leave(idle=not worked)) is not None:
                    self._leave(reason)
                idle = IDLE_SECONDS[0] if worked else min(idle * 1.6, IDLE_SECONDS[1])
                if not worked:
                    self._stopping.wait(idle * random.uniform(0.7, 1.3))
        finally:
            self._give_up_device()
            self.lock.stop_waiting()

    def _leave(self, reason: str) -> None:
        """End the loop by itself, unless it was told to end."""
        if not self._stopping.is_set():
            log.info("leaves", worker=self.worker_id, reason=reason)
            self._stopping.set()

    def _tell(self, reason: str) -> None:
        """Say why no work is done, once for each reason."""
        if reason != self._told:
            self._told = reason
            log.warning("waits", worker=self.worker_id, reason=reason)

    def _once(self) -> bool:
        """Claim and run a task; False when the queue has none for this worker, or the device is locked.

        TooFull and InUse where it can measure nothing.
        """
        self.patience.go_on()
        if self._incumbent.stays and self.lock.awaited():
            self._give_up_device()
        if time.monotonic() - self._reaped > REAP_SECONDS:
            self.broker.register(self.worker_id, os.getpid(), self.bench.facts)  # the queue may have dropped it
            if self.patience.is_over():
                self.broker.reap()
            self._reaped = time.monotonic()
        if time.monotonic() - self._pruned > PRUNE_SECONDS:
            prune(self.bench.home)
            self._pruned = time.monotonic()
        claim = self.broker.claim(self.worker_id, OFF_DEVICE)
        if claim is not None:
            self._refused_since = None
            self._work(claim)
            return True
        if self._rest is not None and time.monotonic() < self._rest[0]:
            raise self._rest[1]
        if (problem := disk_problem(self.bench.home, self.least_free_disk)) is not None:
            raise TooFull(problem)
        # The device is locked before a task is claimed, so that a claimed trial can be measured at once.
        if not self._incumbent.stays and not self._takes_device():
            return False
        claim = None
        try:
            claim = self.broker.claim(self.worker_id, ON_DEVICE)
            if claim is None:
                return False
            self._work(claim)
        finally:
            is_awaited = self.lock.awaited()
            if claim is None or is_awaited or not self._incumbent.stays:
                self._give_up_device()
        if is_awaited:
            self._take_turns()
        return True

    def _takes_device(self) -> bool:
        """Whether the device's lock is free, and now this worker's; InUse once it has been refused for long."""
        if self.lock.acquire():
            self._refused_since = None
            return True
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since >= USUAL_WAIT:
            raise InUse(f"The device is in use by {self.lock.holder()}; this worker measures when it is free.")
        return False

    def _give_up_device(self) -> None:
        """End the best trial's process, and leave the device to others."""
        self._incumbent.close()
        self.lock.release()

    def _take_turns(self) -> None:
        """Leave the device to another worker that waits for it, and run only plans meanwhile."""
        until = time.monotonic() + YIELD_SECONDS
        while time.monotonic() < until and not self._stopping.is_set():
            claim = self.broker.claim(self.worker_id, (TaskKind.plan,))
            if claim is not None:
                self._work(claim)
            self._stopping.wait(0.1)

    def _work(self, claim: Claim) -> None:
        """Run a claimed task while its lease is renewed; a task that fails is recorded with the reason.

        A task that could not end in time is handed back before it has begun, and the worker ends.
        """
        if (reason := self.stay.why_not(claim)) is not None:
            self._persist(lambda: self.broker.release(claim))
            self._leave(reason)
            return
        known = {"task": claim.task_id, "kind": str(claim.kind), "attempt": claim.attempt, "worker": self.worker_id}
        if claim.kind is not TaskKind.estimate:
            known["job"] = claim.job_id
        held = Lease(self.broker, claim, self.bench.sandbox.printed, self.patience)
        with tracing.span(claim.kind, **known), logs.bound(**known), held as lease:
            log.info("claimed")
            self._lease = lease
            if self._now.is_set():
                lease.end()
            how = "given up"
            try:
                how = self._tried(claim, lease)
            finally:
                self._lease = None
                self.bench.sandbox.forget_output()
                log.info("ended", how=how)

    def _tried(self, claim: Claim, lease: Lease) -> str:
        """Run the task, or have it fail with the reason; what became of it."""
        try:
            return self._run(claim, lease)
        except JobFailed as error:
            self._fail(claim, str(error), error.log)
        except TooFull as error:
            if claim.task_id not in self._too_large:
                self._too_large.add(claim.task_id)
                self._rest = time.monotonic() + REST_SECONDS, error
                self._persist(lambda: self.broker.release(claim))
                raise
            self._fail(claim, f"The worker {self.worker_id} cannot run it: {error}.", "")
        except NotOurs as error:
            self._rest = time.monotonic() + REST_SECONDS, error
            self._persist(lambda: self.broker.release(claim))
            raise
        except (BrokerUnavailable, OtherVersion, LeaseLost, Misconfigured):
            raise
        except Exception as error:  # noqa: BLE001 - a defect in this code ends this task, not the worker
            trace = traceback.format_exc()
            sys.stderr.write(trace)
            text = f"The worker failed: {type(error).__name__}: {str(error)[:300]}; its log says where."
            self._fail(claim, text, trace)
        return "failed"

    def _run(self, claim: Claim, lease: Lease) -> str:
        """Run the task and record its result; hand the task back if it was ended before it had one. How that ended."""
        record = self._done(claim, lease)
        if record is not None:
            self._persist(record)
            return "recorded"
        if lease.failure is not None:
            raise lease.failure
        if lease.lost or self._is_ended_again(claim, lease):
            return "left to others"
        self._persist(lambda: self.broker.release(claim))
        return "handed back"

    def _is_ended_again(self, claim: Claim, lease: Lease) -> bool:
        """Whether the task's child was ended from outside for the second time, by neither the user nor this worker.

        Then the task is not handed back: its lease runs out, which counts as a death, so that a guard against a
        shortage of memory, which sends SIGTERM, cannot end it for ever.
        """
        if lease.over.is_set() or self.stay.over():
            return False
        is_again = claim.task_id in self._handed_back
        self._handed_back.add(claim.task_id)
        return is_again

    def _done(self, claim: Claim, lease: Lease) -> Callable[[], None] | None:
        """Run the task; return a function that records its result, or None when it was ended before it had one."""
        broker = self.broker

        def ended() -> bool:
            return lease.over.is_set() or self.stay.over()

        def given_up() -> bool:  # for calls that may take as long as the control plane does not answer
            return ended() or self._stopping.is_set()

        if claim.kind is TaskKind.plan:
            from worker.plan import BadProposal, plan  # imported here, as a worker that only measures needs no Optuna

            try:
                decision = plan(self._persist(lambda: broker.plan_input(claim)))
            except BadProposal as error:
                raise JobFailed(f"The search failed: {error}.") from error
            return lambda: broker.finish_plan(claim, decision)
        if claim.kind is TaskKind.estimate:
            estimate = answer(self.bench, claim, lease.show, ended)
            return None if estimate is None else lambda: broker.finish_estimate(claim, estimate)
        self._incumbent.end_unless_of(claim.job_id if claim.kind is TaskKind.trial else None)
        source = claim.spec.dataset.source
        try:
            self._persist(lambda: broker.fetch(source, self.bench.home / "uploads"), given_up)
        except BadUpload as error:
            raise JobFailed(f"{source} is damaged where the control plane keeps it: {error}") from error
        except (BrokerUnavailable, OtherVersion):
            if not given_up():
                raise
            return None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise TooFull(f"{source} does not fit on the disk of {self.bench.home}") from error
        if claim.kind is TaskKind.trial:
            measurement, log = measure(
                self.bench,
                claim.spec,
                claim.job_id,
                claim.request,
                lease.show,
                ended,
                self.lock.fd,
                incumbent=self._incumbent,
            )
            return None if measurement is None else lambda: broker.finish_trial(claim, measurement, log)
        verifier = Verifier(self.bench, claim.spec, claim.job_id, claim.request, lease.show, ended, self.lock.fd)
        verification = verifier.run()
        return None if verification is None else lambda: broker.finish_verify(claim, verification, verifier.log)

    def _fail(self, claim: Claim, reason: str, log: str) -> None:
        self._persist(lambda: self.broker.fail(claim, reason, log))

    def _persist(self, call: Callable[[], Answer], over: Callable[[], bool] = lambda: False) -> Answer:
        """Repeat a call to the queue until it answers, so that an outage of the database loses no result.

        Where the call is no longer needed (`over`), as after a cancellation, it is not repeated. Nor is it in a worker
        that was told to end, where the queue is of another version, or has not answered for the time of a lease.
        """
        wait, began = IDLE_SECONDS[0], time.monotonic()
        while True:
            try:
                return call()
            except NotOurs:
                raise
            except (BrokerUnavailable, OtherVersion) as error:
                self._tell(str(error))
                self.patience.begin()
                is_in_vain = isinstance(error, OtherVersion) or time.monotonic() - began >= self.patience.seconds
                if self._now.wait(wait) or self.stay.over() or over() or (self._stopping.is_set() and is_in_vain):
                    raise
                wait = min(wait * 1.6, IDLE_SECONDS[1])

"""Workers that kill themselves (SIGKILL) at a certain point of their code, which serve a job one after another.

They are forked, so that the imports are paid for once, and not from pytest's process, which has threads.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import event, select, update
from sqlalchemy.orm import Session

import worker.plan
from service.contract.job import JobSpec
from service.db import connect
from service.models import Job, Task
from service.queue import Queue
from tests.processes import until
from worker.runner import lease, loop, main
from worker.runner.sandbox import Child
from worker.runner.stay import Terms

LEASE_SECONDS, RENEW_SECONDS, REAP_SECONDS = 3.0, 0.02, 0.2
TRIALS = 6
DEATHS = 2  # a third one would give the task up
JOB = {
    "model": {"source": "org/model"},
    "dataset": {"source": "org/data"},
    "training": {"effective_batch_size": 32},
    "search": {"minutes": 60, "verify": "quick", "trials": TRIALS},
}
Strike = Callable[[], None]


def _before(owner: Any, name: str, strike: Strike) -> None:
    """Strike whenever that function is about to be called."""
    original = getattr(owner, name)

    def struck(*arguments: Any, **named: Any) -> Any:
        strike()
        return original(*arguments, **named)

    setattr(owner, name, struck)


def _after_claim(strike: Strike) -> None:
    original = Queue.claim

    def claim(*arguments: Any) -> Any:
        claimed = original(*arguments)
        if claimed is not None:
            strike()
        return claimed

    Queue.claim = claim  # type: ignore[method-assign,assignment]


# Where it strikes, and the calls of a job among which one is drawn.
POINTS: dict[str, tuple[Callable[[Strike], None], int]] = {
    "after-claim": (_after_claim, 8),
    "mid-run": (lambda strike: _before(Child, "watch", strike), 6),
    "before-commit": (lambda strike: event.listen(Session, "before_commit", lambda _: strike()), 30),
    "after-commit": (lambda strike: event.listen(Session, "after_commit", lambda _: strike()), 30),
    "heartbeat": (lambda strike: _before(Queue, "renew", strike), 8),
    "plan": (lambda strike: _before(worker.plan, "plan", strike), 3),
}


def _serve(facts: str, point: str | None, call: int) -> None:
    """Be a worker; at that call of the point, die."""
    left = call

    def strike() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if point is not None:
        POINTS[point][0](strike)
    lease.WISH_SECONDS, loop.REAP_SECONDS = RENEW_SECONDS, REAP_SECONDS  # type: ignore[attr-defined]
    Queue._pause = lambda *_: 0.0  # type: ignore[method-assign]
    here = main.read_facts(Path(facts))
    main.serve(here, "tests.stubs:exclusive", LEASE_SECONDS, None, None, Terms(None, None, None))


def _forked(facts: str, point: str | None, call: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _serve(facts, point, call)
        finally:
            os._exit(0)
    return pid


def _ended(url: str, job: str) -> bool:
    engine = connect(url)  # a connection must not live through a fork
    try:
        with Session(engine) as session:
            return session.scalars(select(Job.status).where(Job.id == job)).one().ended
    finally:
        engine.dispose()


def _lease_runs_out(url: str) -> None:
    """What the dead worker had leased is as if the time of a lease had passed since."""
    engine = connect(url)
    with Session(engine) as session, session.begin():
        leased = update(Task).where(Task.state == "running")
        session.execute(leased.values(lease_until=Task.lease_until - LEASE_SECONDS))
    engine.dispose()


def run(url: str, facts: str, point: str, seed: int) -> int:
    """Submit a job, and serve it by two workers that die at a call which the seed draws, and a third; count deaths."""
    engine = connect(url)
    job = Queue(engine).submit(JobSpec.model_validate(JOB))
    engine.dispose()
    drawn, deaths = random.Random(f"{point} {seed}"), 0
    for number in range(DEATHS + 1):
        pid = _forked(facts, point if number < DEATHS else None, drawn.randint(1, POINTS[point][1]))
        gone: list[int] = []

        def over(pid: int = pid, gone: list[int] = gone) -> bool:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                gone.append(pid)
            return bool(gone) or _ended(url, job)

        until(over, 60, f"the end of worker {number} or of the job")
        if not gone:
            os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            deaths += 1
            _lease_runs_out(url)
        elif _ended(url, job):
            return deaths
    raise AssertionError(f"seed {seed}: the last worker ended before its job")


def program(url: str, facts: str, point: str, *seeds: str) -> None:
    """Take a job a seed through its deaths, and print how many there were."""
    print(sum(run(url, facts, point, int(seed)) for seed in seeds))

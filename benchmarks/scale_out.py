"""How well trials scale with workers: trials an hour by 1 and by 64 workers on PostgreSQL.

    python -m benchmarks.scale_out [--workers 1,64] [--seconds S] [--json FILE]

A trial is two seconds of sleep, so that what is lost is the queue's: claims, renewals, ends of trials with the
recommendation that each computes, and plans. Workers are processes with a connection each. Jobs have 30 trials, all
queued by one stub plan, so that 64 workers share two or three jobs at any moment.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import select

from benchmarks.queue_load import database, spec
from benchmarks.service_load import FACTS
from benchmarks.store import say
from service.contract.states import Origin
from service.contract.task import WISH_SECONDS, PlanClaim, PlanDecision, PlanInput, TaskKind, TrialClaim, TrialRequest
from service.db import connect, reading
from service.models import Task
from service.queue import Queue
from tests.factory import configuration, measured

TRIALS, TRIAL_SECONDS, IDLE_SECONDS = 30, 2.0, 0.5
KINDS = (TaskKind.plan, TaskKind.trial)


def plan(known: PlanInput) -> PlanDecision:
    """All trials at once; the end when all have ended."""
    if len(known.history) == TRIALS:
        return PlanDecision(finish=True)
    if known.history or known.open_trials:
        return PlanDecision()
    numbers = range(1, TRIALS + 1)
    asked = [
        TrialRequest(configuration=configuration(effective=4 * one), origin=Origin.recipe, number=one)
        for one in numbers
    ]
    return PlanDecision(trials=tuple(asked), planned_trials=TRIALS)


def run_trial(queue: Queue, claim: TrialClaim) -> None:
    """Sleep, renew as often as a worker does, and record a measurement."""
    for _ in range(math.ceil(TRIAL_SECONDS / WISH_SECONDS)):
        time.sleep(min(TRIAL_SECONDS, WISH_SECONDS))
        queue.renew(claim, progress="sleeping")
    queue.finish_trial(claim, measured(claim.request.configuration, 5.0 + random.random()), "")


def work(url: str, name: str, ready: Any, over: Any) -> None:
    """A worker, until it is over. Workers begin at moments of their own, as they do in reality."""
    queue = Queue(connect(url))
    queue.register(name, os.getpid(), FACTS)
    ready.wait()
    time.sleep(random.uniform(0, TRIAL_SECONDS))
    while not over.is_set():
        claim = queue.claim(name, KINDS)
        if isinstance(claim, TrialClaim):
            run_trial(queue, claim)
        elif isinstance(claim, PlanClaim):
            queue.finish_plan(claim, plan(queue.plan_input(claim)))
        else:
            time.sleep(IDLE_SECONDS)


def rate(queue: Queue, after: float, until: float) -> float:
    """Trials a second, from the first that ended between those two times to the last."""
    with reading(queue.engine) as session:
        mine = (Task.kind == TaskKind.trial, Task.finished_at.between(after, until))
        moments = sorted(one for one in session.scalars(select(Task.finished_at).where(*mine)) if one is not None)
    return (len(moments) - 1) / (moments[-1] - moments[0])


def trials_per_hour(workers: int, seconds: float) -> float:
    """Trials an hour by that many workers, once all of them are at work."""
    with database("postgresql") as url:
        queue = Queue(connect(url))
        expected = workers * (seconds + 4 * TRIAL_SECONDS) / TRIAL_SECONDS
        for _ in range(math.ceil(expected / TRIALS) + 1):
            queue.submit(spec())
        context = multiprocessing.get_context("spawn")
        ready, over = context.Barrier(workers + 1), context.Event()
        names = [f"w{number}" for number in range(workers)]
        processes = [context.Process(target=work, args=(url, name, ready, over)) for name in names]
        for process in processes:
            process.start()
        ready.wait()
        time.sleep(2 * TRIAL_SECONDS)
        began = time.time()
        time.sleep(seconds)
        found = rate(queue, began, time.time())
        over.set()
        for process in processes:
            process.join()
        queue.engine.dispose()
        assert all(process.exitcode == 0 for process in processes), "a worker failed"
        return 3600 * found


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", default="1,64")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each number of workers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, float] = {}
    for workers in map(int, options.workers.split(",")):
        found[str(workers)] = trials_per_hour(workers, options.seconds)
        say(f"{workers} workers: {found[str(workers)]:,.0f} trials an hour")
    each = [rate / int(workers) for workers, rate in found.items()]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cores": os.cpu_count(), "os": platform.platform(), "python": platform.python_version()},
        "trial_seconds": TRIAL_SECONDS,
        "trials_per_hour": found,
        "of_linear": each[-1] / each[0],
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

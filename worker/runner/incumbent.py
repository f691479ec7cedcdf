"""Keeps the process of a search's best trial, so that a trial that comes close to it takes turns with it.

Trials are minutes apart, and a shared machine changes its pace in that time: a slow moment hides an improvement, and a
fast one makes one up, around which the search then goes on. In turns both are slowed alike (worker/child/turns.py).

That is cheap only where another process's memory is not in the way of a trial: on a host, under a cap of the job's. On
a GPU a trial needs all memory to find its largest batch (docs/decisions/0030).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from service.contract.child import Result, RunBlock
from service.contract.job import JobSpec
from service.contract.measurement import NORMAL, Block, Measurement
from service.contract.objective import minimises_memory
from worker.runner.sandbox import Child
from worker.runner.together import MOST_MEMORY, take_turns

if TYPE_CHECKING:
    from worker.runner.measuring import Bench

# A trial that took between so many times the best one's seconds takes turns with it. What is slower is no finalist
# (worker/plan/finalists.py, CLOSE), and no drift explains what is faster (DRIFT there).
CLOSE, FAR = 1.1, 1 / 1.25
BEGIN_SECONDS, PATIENCE = 60.0, 4.0  # until a child has to be ready for a turn: so long, and times its unit


@dataclass(frozen=True)
class Contender:
    """A good trial's child that stays, what ends it, its job, and what the trial measured."""

    job_id: str
    child: Child
    end: contextlib.ExitStack
    measured: Measurement


class Incumbent:
    """The best trial's process of the job that a worker is searching for, or none."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._best: Contender | None = None

    @property
    def stays(self) -> bool:
        """Whether a process is alive, which also holds the device's lock."""
        return self._best is not None

    def wanted(self, job_id: str, spec: JobSpec) -> bool:
        """Whether the next trial's process should stay. The one that does is ended where it would be in the way."""
        cap, facts = self._bench.host_cap(spec), self._bench.facts
        if self._best is not None:
            taken = (cap or 0) + (self._best.measured.peak_bytes or 0)
            if self._best.job_id != job_id or taken > MOST_MEMORY * facts.memory_bytes:
                self.close()
        return cap is not None and not facts.has_own_memory and not minimises_memory(spec)

    def meet(
        self, new: Contender, spec: JobSpec, on_progress: Callable[[str], None], ended: Callable[[], bool]
    ) -> Measurement:
        """What a good trial measured, by turns with the best one where it is close to it; the faster one stays."""
        old, measured = self._best, new.measured
        if old is not None and FAR < _seconds(measured) / _seconds(old.measured) <= CLOSE:
            on_progress("taking turns with the best so far")
            began = time.monotonic()
            blocks = self._turns(old, new, spec, ended)
            spent = {**measured.time_spent, "turns": round(time.monotonic() - began, 3)}
            measured = measured.model_copy(update={"time_spent": spent})
            if len(blocks) < 2:  # neither of them is known to be well
                self.close()
                return measured
            measured = in_turns(old.measured, measured, *blocks)
        if old is None or _seconds(measured) < _seconds(old.measured):
            self.close()
            self._best = replace(new, measured=measured, end=new.end.pop_all())
        return measured

    def close(self) -> None:
        """End the process."""
        if self._best is not None:
            self._best.end.close()
            self._best = None

    def _turns(self, old: Contender, new: Contender, spec: JobSpec, ended: Callable[[], bool]) -> list[Block]:
        """A block of each, in which they trained the trials' work unit once in turns; fewer where one failed."""
        children = [new.child, old.child]

        def start(request: RunBlock) -> Child:
            child = children.pop()
            child.again(request)
            return child

        place, seed = self._bench.workplace_of(new.job_id), spec.training.seed
        asked = [
            RunBlock(workplace=place, spec=spec, candidate=one.measured, block=0, seed=seed, in_turns=True, stays=True)
            for one in (old, new)
        ]
        limits = [BEGIN_SECONDS + PATIENCE * _seconds(one.measured) for one in (old, new)]
        endings = take_turns(start, asked, limits, ended, self._bench.host_cap(spec), passes=1)
        lasts = [ending.last for ending in endings]
        return [last.block for last in lasts if isinstance(last, Result) and last.block is not None]


def in_turns(best: Measurement, measured: Measurement, of_best: Block, own: Block) -> Measurement:
    """The measurement with the best one's seconds, times the ratio of the seconds that both took in turns."""
    from worker.plan.ratios import standard_error  # imported here because worker.plan imports Optuna

    if best.timing is None or measured.timing is None or of_best.timing is None or own.timing is None:
        return measured
    ratio, alone = own.timing.seconds / of_best.timing.seconds, measured.timing.seconds
    seconds, error = best.timing.seconds * ratio, NORMAL * standard_error(own, of_best)
    factor = seconds / alone
    update_seconds = measured.timing.update_seconds
    timing = measured.timing.model_copy(
        update={
            "seconds": seconds,
            "low": seconds * math.exp(-error),
            "high": seconds * math.exp(error),
            "waiting_seconds": measured.timing.waiting_seconds * factor,
            "update_seconds": None if update_seconds is None else update_seconds * factor,
        }
    )
    note = (
        f"Took turns with the best so far: {1 / ratio:.3f} times as fast, and by this ratio its seconds are told. "
        f"Alone it took {1 / factor:.3f} times as long."
    )
    return measured.model_copy(update={"timing": timing, "notes": (*measured.notes, note)})


def _seconds(measured: Measurement) -> float:
    """The seconds of a good trial's unit."""
    assert measured.timing is not None, "only good trials meet"
    return measured.timing.seconds

"""Keeps the process of a search's best trial, so that a trial that comes close to it takes turns with it.

Trials are minutes apart, and a shared machine changes its pace in that time: a slow moment hides an improvement, and a
fast one makes one up, around which the search then goes on. In turns both are slowed alike (worker/child/turns.py).

That is cheap only where another process's memory is not in the way of a trial: on a host, under a cap of the job's. On
a GPU a trial needs all memory to find its largest batch. See docs/decisions/0030.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from service.contract.child import Result, RunBlock
from service.contract.hardware import HOST_KEPT_BACK
from service.contract.job import JobSpec
from service.contract.measurement import NORMAL, Block, Measurement
from service.contract.objective import minimises_memory
from service.contract.task import TrialRequest
from worker import host
from worker.runner.sandbox import Child, Ending
from worker.runner.together import take_turns

if TYPE_CHECKING:
    from worker.runner.measuring import Bench

# A trial takes turns with the best one if, at the pace of the latest turns, it took at most CLOSE times its seconds and
# more than FAR times. What is slower can be a finalist for its batching only (WITHIN in worker/plan/view.py); what is
# that much faster is faster at any pace, as FAR is 1 / DRIFT. Both are chosen, not measured (docs/decisions/0030). If
# the range is far wider, time goes into turns that decide nothing. If it is far narrower, a trial in a slow moment
# seems slower than the best one although it is faster.
CLOSE, FAR = 1.15, 0.8
# A child has to be ready for a turn within READY_SECONDS and READY_FACTOR times the seconds of its unit.
READY_SECONDS, READY_FACTOR = 60.0, 4.0


@dataclass(frozen=True)
class Contender:
    """A good trial's child that stays, what ends it, its job, and what the trial measured.

    `best_seconds` are the seconds of the fastest work unit before this trial; None for the search's first.
    """

    job_id: str
    child: Child
    end: contextlib.ExitStack
    measured: Measurement
    best_seconds: float | None = None


class Incumbent:
    """The best trial's process of the job that a worker is searching for, or none."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._best: Contender | None = None
        self._pace = 1.0  # how many times as long the best one's unit took in the latest turns as in its trial

    @property
    def stays(self) -> bool:
        """Whether a process is alive, which also holds the device's lock."""
        return self._best is not None

    def wanted(self, spec: JobSpec) -> bool:
        """Whether the next trial's process should stay alive. Ends the kept one where a trial needs its memory."""
        cap = self._bench.host_cap(spec)
        if cap is None or cap > (1 - HOST_KEPT_BACK) * host.memory().available:
            self.close()
        return cap is not None and not minimises_memory(spec)

    def at_pace(self, trial: TrialRequest) -> TrialRequest:
        """The request, with the best seconds as they would be at the pace of the latest turns."""
        if self._best is None or trial.best_seconds is None:
            return trial
        return trial.model_copy(update={"best_seconds": trial.best_seconds * self._pace})

    def end_unless_of(self, job_id: str | None) -> None:
        """End the kept process unless it belongs to this job."""
        if self._best is not None and self._best.job_id != job_id:
            self.close()

    def meet(
        self, new: Contender, spec: JobSpec, on_progress: Callable[[str], None], ended: Callable[[], bool]
    ) -> Measurement:
        """What a good trial measured, by turns with the best one where it is close to it; the best one stays.

        The seconds of one that is not close are divided by how much slower the machine was in the latest turns, so that
        they compare with the best one's.
        """
        old, measured = self._best, new.measured
        if old is not None and FAR < _seconds(measured) / (_seconds(old.measured) * self._pace) <= CLOSE:
            on_progress("taking turns with the best so far")
            measured = self._compared(old, new, spec, ended)
            if self._best is None:
                return measured
        elif self._pace != 1.0:
            measured = at_the_pace_of_trials(measured, self._pace)
        if _is_best(measured, old.measured if old else None, new.best_seconds):
            pace = self._pace if old else 1.0
            self.close()
            self._best, self._pace = replace(new, measured=measured, end=new.end.pop_all()), pace
        return measured

    def close(self) -> None:
        """End the process."""
        if self._best is not None:
            best, self._best, self._pace = self._best, None, 1.0
            best.end.close()

    def _compared(self, old: Contender, new: Contender, spec: JobSpec, ended: Callable[[], bool]) -> Measurement:
        """What the trial measured, by turns with the best one. If they fail, its own timing stands, and both end."""
        began, measured, blocks = time.monotonic(), new.measured, list[Block]()
        try:
            endings = self._turns(old, new, spec, ended)
            blocks = [one.last.block for one in endings if isinstance(one.last, Result) and one.last.block is not None]
        finally:
            if len(blocks) < 2:
                self.close()
        if len(blocks) == 2:
            measured = in_turns(old.measured, measured, *blocks)
            if blocks[0].timing is not None:
                self._pace = blocks[0].timing.seconds / _seconds(old.measured)
        else:
            reason = next((one.reason for one in endings if one.reason), "they were ended")
            note = f"It took no turns with the best so far: {reason}"
            measured = measured.model_copy(update={"notes": (*measured.notes, note)})
        spent = {**measured.time_spent, "turns": round(time.monotonic() - began, 3)}
        return measured.model_copy(update={"time_spent": spent})

    def _turns(self, old: Contender, new: Contender, spec: JobSpec, ended: Callable[[], bool]) -> list[Ending]:
        """How blocks ended in which both trained the trials' work unit once, in turns."""
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
        limits = [READY_SECONDS + READY_FACTOR * _seconds(one.measured) for one in (old, new)]
        return take_turns(start, asked, limits, ended, self._bench.host_cap(spec), passes=1)


def in_turns(best: Measurement, measured: Measurement, of_best: Block, own: Block) -> Measurement:
    """The new trial's measurement, its seconds replaced by the best trial's times the ratio of the two in turns.

    Its interval is that of the ratio. As a trial's own does, it leaves out how processes differ.
    """
    from worker.plan.ratios import standard_error  # imported here, as it imports numpy

    if best.timing is None or measured.timing is None or of_best.timing is None or own.timing is None:
        return measured
    ratio, error = own.timing.seconds / of_best.timing.seconds, NORMAL * standard_error(own, of_best)
    seconds = best.timing.seconds * ratio
    factor = seconds / measured.timing.seconds
    told = {
        "low": seconds * math.exp(-error),
        "high": seconds * math.exp(error),
        "clean_share": own.timing.clean_share,
        "largest_share_of_others": own.timing.largest_share_of_others,
    }
    note = (
        f"Took turns with the best so far: {1 / ratio:.3f} times as fast, and by this ratio its seconds are told. "
        f"Alone it took {1 / factor:.3f} times as long."
    )
    return _scaled(measured, factor, note, told)


def at_the_pace_of_trials(measured: Measurement, pace: float) -> Measurement:
    """The measurement at the pace of earlier trials, while the machine now takes `pace` times as long as then."""
    note = f"The machine was at another pace: its seconds were {pace:.3f} times as long as they are told here."
    return _scaled(measured, 1 / pace, note, {})


def _scaled(measured: Measurement, factor: float, note: str, told: dict[str, Any]) -> Measurement:
    """The measurement with its seconds times the factor, what is `told` of its timing instead, and a note."""
    assert measured.timing is not None, "only good trials meet"
    changes = {
        "timing": measured.timing.scaled(factor).model_copy(update=told),
        "curve": tuple(one.scaled(factor) for one in measured.curve),
        "notes": (*measured.notes, note),
    }
    return measured.model_copy(update=changes)


def _is_best(measured: Measurement, best: Measurement | None, best_seconds: float | None) -> bool:
    """Whether a trial is the fastest so far: surely faster than `best`, or within CLOSE times `best_seconds`.

    Surely, by its interval: a trial's seconds follow from its ratio to the best one's. If each that seemed faster took
    the best one's place, lucky ratios would be selected, and seconds would fall from trial to trial of equal speed.

    `best_seconds` decide if no process of the best trial is alive (`best` is None). The search's first trial is always
    the fastest; one of which only a part of the work unit was timed never is.
    """
    if measured.timing is None or measured.timing.timed_share < 1.0:
        return False
    if best is not None:
        return measured.timing.high < _seconds(best)
    return best_seconds is None or _seconds(measured) <= CLOSE * best_seconds


def _seconds(measured: Measurement) -> float:
    """The seconds of a good trial's unit."""
    assert measured.timing is not None, "only good trials meet"
    return measured.timing.seconds

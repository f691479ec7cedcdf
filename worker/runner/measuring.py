"""Runs a claimed trial in a child process, and in another after each out-of-memory error, and makes its Measurement."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from service.contract.child import (
    Built,
    ChildFailed,
    EndingKind,
    OutOfMemory,
    ProbeDone,
    ProbeStarted,
    Result,
    RunTrial,
    Workplace,
    doing,
)
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import PREPARE, Measurement, Outcome, Probe
from service.contract.states import ProbePhase
from service.contract.task import TrialRequest
from worker.runner.incumbent import Contender, Incumbent
from worker.runner.sandbox import Ending, Sandbox
from worker.runner.watchdog import LEAST_FREE_BYTES

FAILED = "failed"  # the phase of children that did not come to a measurement
LEAST_CHILD_SECONDS = 10.0  # that a child of a trial has, also where those before it took all of the trial's time
MOST_CHILDREN = 4  # of one trial: memory may run out three times, after which the probe goes on in another child
# "you tried to allocate 1048576 bytes" (CPU), "Tried to allocate 2.00 GiB" (CUDA).
ALLOCATION = re.compile(r"tried to allocate (?P<amount>[\d.]+) ?(?P<unit>bytes|[KMG]iB)", re.IGNORECASE)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class JobFailed(Exception):
    """No trial of the job can run. The text is for the job's user; `log` is the end of the child's output."""

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log


@dataclass(frozen=True)
class Bench:
    """A device, the sandbox that runs children on it, and the folders and permissions that every child has."""

    sandbox: Sandbox
    facts: HardwareFacts
    home: Path
    workplace: Workplace

    def host_cap(self, spec: JobSpec) -> int | None:
        """The host memory that a child may take, or None; on a GPU the job's cap is one on the GPU's memory."""
        cap = spec.hardware.memory_gib
        return int(cap * 2**30) if cap and not self.facts.has_own_memory else None

    def workplace_of(self, job_id: str) -> Workplace:
        """The workplace of a child of this job, with the job's own cache folder."""
        return self.workplace.model_copy(update={"job_cache": self.home / "cache" / job_id})


def measure(
    bench: Bench,
    spec: JobSpec,
    job_id: str,
    trial: TrialRequest,
    on_progress: Callable[[str], None],
    ended: Callable[[], bool],
    lock_fd: int | None,
    only_probe: bool = False,
    incumbent: Incumbent | None = None,
) -> tuple[Measurement | None, str]:
    """(measurement, log); the measurement is None when `ended` stopped the trial.

    Raises JobFailed if no trial of the job can run.

    With `only_probe` the trial finds its largest micro batch and times nothing. With an `incumbent` a good trial takes
    turns with the best one so far.
    """
    stays = incumbent is not None and incumbent.wanted(spec)
    trial = incumbent.at_pace(trial) if incumbent is not None else trial
    attempts = _Attempts(trial)
    for _ in range(MOST_CHILDREN):
        limit = attempts.seconds_limit
        request = RunTrial(
            workplace=bench.workplace_of(job_id),
            spec=spec,
            trial=trial.model_copy(update={"seconds_limit": limit}),
            known=tuple(attempts.probes),
            only_probe=only_probe,
            stays=stays,
        )
        with contextlib.ExitStack() as end:
            child = end.enter_context(bench.sandbox.started(request, lock_fd))
            ending = child.watch(
                limit,
                lambda message: on_progress(what) if (what := doing(message)) is not None else None,
                ended,
                bench.host_cap(spec),
            )
            begun = attempts.add(ending)
            if incumbent is not None and isinstance(ending.last, Result) and ending.last.stays:
                contender = Contender(job_id, child, end, attempts.concluded(ending), trial.best_seconds)
                return incumbent.meet(contender, spec, on_progress, ended), attempts.log
        if ending.kind is EndingKind.ended:
            return None, attempts.log
        if isinstance(ending.last, Result):
            return attempts.concluded(ending), attempts.log
        attempts.has_failed(ending)
        if ending.kind is not EndingKind.out_of_memory or begun is None:
            return attempts.concluded(ending), attempts.log
        # An out-of-memory error leaves memory behind in its process, so another child goes on from the known probes.
        attempts.know(begun)
        if begun.micro_batch_size <= 1 and begun.phase is not ProbePhase.evaluation:
            return attempts.infeasible(_no_room(trial) + memory_sentence(ending)), attempts.log
    sizes = ", ".join(str(probe.micro_batch_size) for probe in attempts.probes if probe.peak_bytes is None)
    reason = f"memory ran out {MOST_CHILDREN} times (micro batches {sizes}), so it is not safe at any size tried"
    return attempts.infeasible(reason), attempts.log


class _Attempts:
    """The children of one trial, one after the other: what they have found, and the seconds of those that failed."""

    def __init__(self, trial: TrialRequest) -> None:
        self._trial, self._began = trial, time.monotonic()
        self._seen = Measurement(configuration=trial.configuration, outcome=Outcome.infeasible)
        self._failed_seconds = self._prepared_seconds = 0.0
        self.probes: list[Probe] = []
        self.log = ""

    @property
    def seconds_limit(self) -> float:
        """The next child's time limit: what is left of the trial's, without what only a job's first process does."""
        return max(LEAST_CHILD_SECONDS, self._trial.seconds_limit - (self._failed_seconds - self._prepared_seconds))

    def add(self, ending: Ending) -> Probe | None:
        """Add what a child found; return the probe that it had begun and not ended."""
        self.log += ending.log
        begun, done = _probes(ending)
        self.probes += done
        self._seen = self._seen.model_copy(update={**_built(ending), "probes": tuple(self.probes)})
        return begun

    def know(self, failed: Probe) -> None:
        """Add a probe that ran out of memory."""
        self.probes.append(failed)
        self._seen = self._seen.model_copy(update={"probes": tuple(self.probes)})

    def has_failed(self, ending: Ending) -> None:
        """Count the seconds up to the end of a child without a result."""
        self._failed_seconds = time.monotonic() - self._began
        self._prepared_seconds += sum(one.prepare_seconds for one in ending.seen if isinstance(one, Built))

    def concluded(self, ending: Ending) -> Measurement:
        """The measurement that a child ended with, or what its end says."""
        return self._with_seconds(_conclude(ending, self._seen))

    def infeasible(self, reason: str) -> Measurement:
        """The measurement of a trial that does not fit."""
        return self._with_seconds(_with_reason(self._seen, reason))

    def _with_seconds(self, measured: Measurement) -> Measurement:
        """The measurement, with this trial's failed children and the job's preparation added to `time_spent`."""
        failed, prepared = self._failed_seconds, self._prepared_seconds
        phases = measured.time_spent | ({FAILED: round(max(0.0, failed - prepared), 3)} if failed else {})
        phases |= {PREPARE: round(prepared, 3)} if prepared else {}
        return measured.model_copy(update={"time_spent": phases})


def _no_room(trial: TrialRequest) -> str:
    """The beginning of a sentence: one sample ran out of memory, and what earlier trials had led to expect of it."""
    if trial.memory_line is None:
        return "not even a micro batch of 1 fits"
    usual = trial.memory_line.at(1) / 2**30
    return f"memory ran out at a micro batch of 1, for which configurations that fit suggest {usual:.2f} GiB"


def memory_sentence(ending: Ending) -> str:
    """The end of a sentence: the memory in use when it ran out, what was needed, and what others use of the GPU."""
    last, text, wanted = ending.last, f": {ending.reason}", ALLOCATION.search(ending.reason)
    if not isinstance(last, OutOfMemory):
        return text
    if last.used_bytes is not None:
        text = f"; {last.used_bytes / 2**30:.2f} GiB were held"
        if wanted:
            need = last.used_bytes + float(wanted["amount"]) * UNITS[wanted["unit"].lower()]
            text += f" and {need / 2**30:.2f} GiB ({need:,.0f} bytes) needed to go on"
    if last.others_bytes > 1 << 30:
        gib = last.others_bytes / 2**30
        text += f"; {gib:.1f} GiB of this GPU are held by other processes, or outside of torch's allocator"
    return text


def outcome_of(ending: Ending) -> Outcome:
    """The outcome of a trial or block whose child ended with neither a result nor an out-of-memory error."""
    if isinstance(ending.last, ChildFailed):
        return ending.last.outcome
    return Outcome.timed_out if ending.kind is EndingKind.timed_out else Outcome.crashed


def _probes(ending: Ending) -> tuple[Probe | None, list[Probe]]:
    """(the size that was begun last before the child ended, as a probe without a peak; those of sizes that fitted)."""
    begun = [message for message in ending.seen if isinstance(message, ProbeStarted)]
    done = [message.probe for message in ending.seen if isinstance(message, ProbeDone)]
    if not begun:
        return None, done
    return Probe(micro_batch_size=begun[-1].micro_batch_size, peak_bytes=None, phase=begun[-1].phase), done


def _built(ending: Ending) -> dict[str, Any]:
    """The fields of a Measurement that the child told before it ended."""
    told = [message for message in ending.seen if isinstance(message, Built)]
    return told[-1].fields() if told else {}


def _conclude(ending: Ending, seen: Measurement) -> Measurement:
    """The measurement of a trial whose last child has ended; `seen` holds what its children told before."""
    last = ending.last
    if isinstance(last, Result) and last.measurement is not None:
        return last.measurement.model_copy(update={"probes": seen.probes})
    if ending.kind is EndingKind.out_of_memory:
        return _with_reason(seen, f"memory ran out while it was built{memory_sentence(ending)}")
    if isinstance(last, ChildFailed) and last.whole_job:
        raise JobFailed(ending.reason, ending.log)
    reason = ending.reason or "its process answered another question"
    lacks = seen.lacks | (last.lacks if isinstance(last, ChildFailed) else {})
    return seen.model_copy(update={"outcome": outcome_of(ending), "reason": reason, "lacks": lacks})


def _with_reason(seen: Measurement, reason: str) -> Measurement:
    return seen.model_copy(update={"reason": reason})


def disk_problem(home: Path, least: int) -> str | None:
    """A sentence when too little disk is free to measure, else None.

    That is less than `least` bytes in the worker's home, or less where temporary files are than any child may leave:
    each would be ended as one that fills the disk.
    """
    places = ((home, least, "caches", "DYNOTUNE_HOME"), (Path(gettempdir()), LEAST_FREE_BYTES, "trials", "TMPDIR"))
    for folder, needed, purpose, setting in places:
        free = shutil.disk_usage(folder).free
        if free < needed:
            return (
                f"Too little disk: {free / 2**30:.1f} GiB free at {folder}, {needed / 2**30:.1f} GiB needed for "
                f"{purpose}; free some, or set {setting} to another disk"
            )
    return None

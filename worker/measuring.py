"""Runs a claimed trial: its child, another one after each out-of-memory, and a Measurement whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome, Probe
from service.contract.task import TrialRequest
from worker.sandbox import Ending, Sandbox

MOST_CHILDREN = 4


class JobFailed(Exception):
    """The job as a whole cannot run; the text is for its user."""


@dataclass(frozen=True)
class Bench:
    """What every child of this worker is given."""

    sandbox: Sandbox
    facts: HardwareFacts
    home: Path
    data_roots: tuple[Path, ...]
    hub_cache: Path
    allow_pickle: bool = False
    allow_remote_code: bool = False

    def request(self, spec: JobSpec, job_id: str, **more: Any) -> dict[str, Any]:
        """A child's request."""
        return {
            "spec": spec.model_dump(mode="json"),
            "device": self.facts.device,
            "index": self.facts.index,
            "cache": str(self.home / "cache" / job_id),
            "data_roots": [str(root) for root in self.data_roots],
            "hub_cache": str(self.hub_cache),
            "allow_pickle": self.allow_pickle,
            "allow_remote_code": self.allow_remote_code,
            **more,
        }


def measure(
    bench: Bench,
    spec: JobSpec,
    job_id: str,
    trial: TrialRequest,
    on_progress: Callable[[str], None],
    ended: Callable[[], bool],
    lock_fd: int | None,
) -> tuple[Measurement | None, str]:
    """(measurement, log); no measurement when it was ended from outside. JobFailed when no trial can run."""
    failed_at: int | None = None
    probes: list[Probe] = []
    log = ""
    for _ in range(MOST_CHILDREN):
        request = bench.request(spec, job_id, mode="trial", trial=trial.model_dump(mode="json"), failed_at=failed_at)
        ending = bench.sandbox.run(
            request, trial.seconds_limit, lambda message: _tell(message, on_progress), ended, lock_fd
        )
        log += ending.log
        begun, seen = _probes(ending)
        probes += seen
        if ending.kind == "ended":
            return None, log
        if ending.kind != "out_of_memory" or begun is None:
            return _conclude(ending, trial.configuration, probes), log
        # A process is not clean after an out-of-memory error: the next child goes on from what is known.
        probes.append(Probe(micro_batch_size=begun, peak_bytes=None))
        failed_at = begun
        if begun <= 1:
            break
    return _infeasible(trial.configuration, probes, "not even a micro batch of 1 fits into the memory given"), log


def _tell(message: dict[str, Any], on_progress: Callable[[str], None]) -> None:
    if message["kind"] == "progress":
        on_progress(message["text"])
    elif message["kind"] == "probe_started":
        on_progress(f"probing micro batch {message['micro_batch_size']}")


def _probes(ending: Ending) -> tuple[int | None, list[Probe]]:
    """(the size under way when the child ended, the sizes that ran)."""
    begun = [message["micro_batch_size"] for message in ending.seen if message["kind"] == "probe_started"]
    done = [Probe.model_validate(message["probe"]) for message in ending.seen if message["kind"] == "probe"]
    return (begun[-1] if begun else None), done


def _conclude(ending: Ending, configuration: Configuration, probes: list[Probe]) -> Measurement:
    if ending.kind == "result":
        measurement = Measurement.model_validate(ending.message["result"])
        failed = tuple(probe for probe in probes if probe.peak_bytes is None)
        update: dict[str, Any] = {"probes": failed + measurement.probes}
        if failed and measurement.outcome is Outcome.ok:
            update["limited_by"] = "memory"
        return measurement.model_copy(update=update)
    if ending.kind == "out_of_memory":
        return _infeasible(configuration, probes, f"memory ran out while it was built: {ending.reason}")
    if ending.kind == "failed":
        if ending.message.get("whole_job"):
            raise JobFailed(ending.reason)
        outcome, reason = Outcome(ending.message["outcome"]), ending.reason
    elif ending.kind == "timed_out":
        outcome, reason = Outcome.timed_out, ending.reason
    else:
        outcome, reason = Outcome.crashed, ending.reason
    return Measurement(configuration=configuration, outcome=outcome, reason=reason, probes=tuple(probes))


def _infeasible(configuration: Configuration, probes: list[Probe], reason: str) -> Measurement:
    return Measurement(configuration=configuration, outcome=Outcome.infeasible, reason=reason, probes=tuple(probes))


def free_disk_problem(home: Path, least: int) -> str | None:
    """A sentence when too little disk is free to measure, else None."""
    stat = os.statvfs(home)
    free = stat.f_bavail * stat.f_frsize
    if free >= least:
        return None
    return (
        f"Too little disk: {free / 2**30:.1f} GiB free at {home}, {least / 2**30:.1f} GiB needed for caches; "
        "free some, or set DYNOTUNE_HOME to another disk"
    )

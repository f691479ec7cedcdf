"""Runs a claimed trial: its child, another one after each out-of-memory, and a Measurement whatever happens."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome, Probe
from service.contract.task import TrialRequest
from worker.runner.sandbox import Ending, Sandbox

MOST_CHILDREN = 4
# "you tried to allocate 1048576 bytes" (CPU), "Tried to allocate 2.00 GiB" (CUDA).
ALLOCATION = re.compile(r"tried to allocate (?P<amount>[\d.]+) ?(?P<unit>bytes|[KMG]iB)", re.IGNORECASE)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class JobFailed(Exception):
    """The job as a whole cannot run; the text is for its user, `log` the end of the child's output."""

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log


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

    def host_cap(self, spec: JobSpec) -> int | None:
        """Host memory that a child may take; on a GPU the job's cap is the GPU's."""
        cap = spec.hardware.memory_gib
        return int(cap * 2**30) if cap and not self.facts.has_own_memory else None

    def request(self, spec: JobSpec, job_id: str, **more: Any) -> dict[str, Any]:
        """A child's request."""
        return {
            "spec": spec.model_dump(mode="json"),
            "device": self.facts.device,
            "index": self.facts.index,
            "cache": str(self.home / "cache" / job_id),
            "data_roots": [str(root) for root in self.data_roots],
            "quantised": str(self.home / "quantised"),
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
    mode: Literal["trial", "probe"] = "trial",
) -> tuple[Measurement | None, str]:
    """(measurement, log); no measurement when it was ended from outside. JobFailed when no trial can run.

    Mode `probe` finds the largest micro batch only.
    """
    probes: list[Probe] = []
    log = ""
    for _ in range(MOST_CHILDREN):
        known = [probe.model_dump(mode="json") for probe in probes]
        request = bench.request(spec, job_id, mode=mode, trial=trial.model_dump(mode="json"), known=known)
        ending = bench.sandbox.run(
            request,
            trial.seconds_limit,
            lambda message: _tell(message, on_progress),
            ended,
            lock_fd,
            bench.host_cap(spec),
        )
        log += ending.log
        begun, seen = _probes(ending)
        probes += seen
        if ending.kind == "ended":
            return None, log
        if ending.kind != "out_of_memory" or begun is None:
            return _conclude(ending, trial.configuration, probes), log
        # A process is not clean after an out-of-memory error: the next child goes on from what is known.
        probes.append(begun)
        if begun.micro_batch_size <= 1 and begun.phase == "training":
            return _infeasible(
                trial.configuration, probes, f"not even a micro batch of 1 fits{memory_sentence(ending)}"
            ), log
    sizes = ", ".join(str(probe.micro_batch_size) for probe in probes if probe.peak_bytes is None)
    reason = f"memory ran out {MOST_CHILDREN} times (micro batches {sizes}), so it is not safe at any size tried"
    return _infeasible(trial.configuration, probes, reason), log


def memory_sentence(ending: Ending) -> str:
    """What was held when memory ran out, what more was asked for, and who else holds some."""
    message, text, wanted = ending.message, f": {ending.reason}", ALLOCATION.search(ending.reason)
    if "used_bytes" in message:
        text = f"; {message['used_bytes'] / 2**30:.2f} GiB were held"
        if wanted:
            need = message["used_bytes"] + float(wanted["amount"]) * UNITS[wanted["unit"].lower()]
            text += f" and {need / 2**30:.2f} GiB ({need:,.0f} bytes) needed to go on"
    if message.get("others_bytes", 0) > 1 << 30:
        text += f"; other processes hold {message['others_bytes'] / 2**30:.1f} GiB of this GPU"
    return text


def _tell(message: dict[str, Any], on_progress: Callable[[str], None]) -> None:
    if message["kind"] == "progress":
        on_progress(message["text"])
    elif message["kind"] == "probe_started":
        on_progress(f"probing micro batch {message['micro_batch_size']}")


def _probes(ending: Ending) -> tuple[Probe | None, list[Probe]]:
    """(the size under way when the child ended, as a probe without a peak; the sizes that ran)."""
    begun = [
        Probe(micro_batch_size=message["micro_batch_size"], peak_bytes=None, phase=message["phase"])
        for message in ending.seen
        if message["kind"] == "probe_started"
    ]
    done = [Probe.model_validate(message["probe"]) for message in ending.seen if message["kind"] == "probe"]
    return (begun[-1] if begun else None), done


def _conclude(ending: Ending, configuration: Configuration, probes: list[Probe]) -> Measurement:
    if ending.kind == "result":
        measurement = Measurement.model_validate(ending.message["result"])
        return measurement.model_copy(update={"probes": tuple(probes)})
    if ending.kind == "out_of_memory":
        return _infeasible(configuration, probes, f"memory ran out while it was built{memory_sentence(ending)}")
    if ending.kind == "failed":
        if ending.message.get("whole_job"):
            raise JobFailed(ending.reason, ending.log)
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

"""The child's entry: own process group, memory cap, output to a file, and an end with its worker.

Says all it knows through a pipe, as dictionaries with a `kind`: progress, probe_started, probe, and last of all
result, out_of_memory, or failed. What it does not say (a segfault, a hang, a kill) its worker sees.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def isolate(lifeline: Connection, log: Path) -> None:
    """Become a process group of our own, write to `log`, and die when the worker does."""
    os.setpgid(0, 0)
    with log.open("ab", buffering=0) as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Our parent is the fork server, which ends with the worker; the pipe is for where prctl does not exist.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        try:
            lifeline.poll(None)
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


def main(request: dict[str, Any], messages: Connection, lifeline: Connection, log: str, _lock: object) -> None:
    """Run one request and say how it ended. `_lock` is held open: the device's lock goes with the last of us."""
    isolate(lifeline, Path(log))
    warnings.simplefilter("default")
    cache = tempfile.mkdtemp(prefix="dynotune-compile-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # cold: somebody else's warm cache would make compile look free
    try:
        messages.send(_answer(request, messages))
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        messages.close()
        sys.stdout.flush()
        sys.stderr.flush()


def _answer(request: dict[str, Any], messages: Connection) -> dict[str, Any]:
    """The last message. Every error becomes one: this is the boundary of the process."""
    from worker.devices.base import is_out_of_memory
    from worker.trial.problem import JobProblem, TrialProblem, Unstable

    def failed(outcome: str, error: BaseException, whole_job: bool = False) -> dict[str, Any]:
        return {"kind": "failed", "outcome": outcome, "reason": str(error), "whole_job": whole_job}

    try:
        return {"kind": "result", "result": _run(request, messages)}
    except JobProblem as error:
        return failed("invalid", error, whole_job=True)
    except TrialProblem as error:
        return failed("invalid", error)
    except Unstable as error:
        return failed("unstable", error)
    except TimeoutError as error:
        return failed("timed_out", error)
    except Exception as error:  # noqa: BLE001 - the boundary: its worker records it with the traceback in the log
        traceback.print_exc()
        if is_out_of_memory(error):
            return {"kind": "out_of_memory", "reason": str(error).strip().split("\n", 1)[0][:300]}
        return failed("crashed", RuntimeError(f"{type(error).__name__}: {str(error).strip()[:300]}"))


def _run(request: dict[str, Any], messages: Connection) -> dict[str, Any]:
    from service.contract.job import JobSpec
    from service.contract.measurement import Measurement
    from service.contract.paths import Roots
    from service.contract.task import TrialRequest
    from worker.devices import open_device
    from worker.trial import measure, verify
    from worker.trial.build import Limits

    spec = JobSpec.model_validate(request["spec"])
    device = open_device(request["device"], request["index"])
    cap = spec.hardware.memory_gib
    device.limit(int(cap * 2**30) if cap else None)
    limits = Limits(
        roots=Roots(tuple(Path(root) for root in request["data_roots"]), Path(request["hub_cache"])),
        cache=Path(request["cache"]),
        allow_pickle=request["allow_pickle"],
        allow_remote_code=request["allow_remote_code"],
    )
    if request["mode"] == "trial":
        trial = TrialRequest.model_validate(request["trial"])
        found = measure.run_trial(spec, trial, device, limits, messages.send, request.get("failed_at"))
        return found.model_dump(mode="json")
    candidate = Measurement.model_validate(request["candidate"])
    if request["mode"] == "block":
        block = verify.run_block(spec, candidate, request["block"], request["seed"], device, limits)
        return block.model_dump(mode="json")
    soak = verify.run_soak(spec, candidate, request["seed"], device, limits, request["seconds"])
    return soak.model_dump(mode="json")

"""The child's entry: runs one request under its memory cap and says how it ended.

Says all it knows through a pipe, as dictionaries with a `kind`: progress, probe_started, probe, and last of all
result, out_of_memory, or failed. What it does not say (a segfault, a hang, a kill) its worker sees.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.child.build import Limits
    from worker.devices import Device

from worker.child.isolation import isolate


def main(request: dict[str, Any], messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Run one request and say how it ended. `_lock` is held open: the device's lock goes with the last of us."""
    isolate(lifeline, scratch)
    warnings.simplefilter("default")
    # Cold: a warm cache of somebody else would make compile look free.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(scratch) / "compile")
    messages.send(_answer(request, messages))
    messages.close()
    sys.stdout.flush()
    sys.stderr.flush()


def _answer(request: dict[str, Any], messages: Connection) -> dict[str, Any]:
    """The last message. Every error becomes one: this is the boundary of the process."""
    from worker.child.problem import JobProblem, TrialProblem, Unsafe, Unstable
    from worker.devices.base import is_out_of_memory

    def failed(outcome: str, error: BaseException, whole_job: bool = False) -> dict[str, Any]:
        return {"kind": "failed", "outcome": outcome, "reason": str(error), "whole_job": whole_job}

    opened: list[Device] = []
    try:
        return {"kind": "result", "result": _run(request, messages, opened)}
    except JobProblem as error:
        return failed("invalid", error, whole_job=True)
    except TrialProblem as error:
        return failed("invalid", error)
    except Unstable as error:
        return failed("unstable", error)
    except Unsafe as error:
        return failed("unstable", error) | {"unsafe": True}
    except TimeoutError as error:
        return failed("timed_out", error)
    except Exception as error:  # noqa: BLE001 - the boundary: its worker records it with the traceback in the log
        traceback.print_exc()
        if is_out_of_memory(error):
            reason = str(error).strip().split("\n", 1)[0][:300]
            return {"kind": "out_of_memory", "reason": reason, **_memory_of(opened)}
        return failed("crashed", RuntimeError(f"{type(error).__name__}: {str(error).strip()[:300]}"))


def _memory_of(opened: list[Device]) -> dict[str, int]:
    """What was held when memory ran out, and what others hold, in bytes."""
    if not opened:
        return {}
    device = opened[0]
    others = device.used_by_others() if device.torch.type == "cuda" else 0
    return {"used_bytes": device.peak(), "others_bytes": others}


def _run(request: dict[str, Any], messages: Connection, opened: list[Device]) -> dict[str, Any]:
    from service.contract.job import JobSpec
    from service.contract.measurement import Measurement, Probe
    from service.contract.task import TrialRequest
    from worker.child import block, measure, soak
    from worker.devices import open_device

    if request["mode"] == "estimate":
        return _estimate(request)
    spec = JobSpec.model_validate(request["spec"])
    device = open_device(request["device"], request["index"])
    opened.append(device)
    cap = spec.hardware.memory_gib
    device.limit(int(cap * 2**30) if cap else None)
    limits = _limits(request)
    if request["mode"] in ("trial", "probe"):
        trial = TrialRequest.model_validate(request["trial"])
        known = tuple(Probe.model_validate(one) for one in request.get("known", ()))
        found = measure.run_trial(spec, trial, device, limits, messages.send, known, request["mode"] == "probe")
        return found.model_dump(mode="json")
    candidate = Measurement.model_validate(request["candidate"])
    if request["mode"] == "block":
        done = block.run_block(spec, candidate, request["block"], request["seed"], device, limits)
        return done.model_dump(mode="json")
    certificate = soak.run_soak(spec, candidate, request["seed"], device, limits, request["seconds"])
    return certificate.model_dump(mode="json")


def _limits(request: dict[str, Any]) -> Limits:
    from service.contract.paths import Roots
    from worker.child.build import Limits

    return Limits(
        roots=Roots(tuple(Path(root) for root in request["data_roots"]), Path(request["hub_cache"])),
        cache=Path(request["cache"]),
        allow_pickle=request["allow_pickle"],
        allow_remote_code=request["allow_remote_code"],
        quantised=Path(request["quantised"]),
    )


def _estimate(request: dict[str, Any]) -> dict[str, Any]:
    from service.contract.estimate import EstimateRequest, Known
    from service.contract.hardware import HardwareFacts
    from worker.child.memory_estimate import estimate

    asked, facts = EstimateRequest.model_validate(request["estimate"]), HardwareFacts.model_validate(request["facts"])
    known = tuple(Known.model_validate(one) for one in request["known"])
    return estimate(asked, facts, known, _limits(request)).model_dump(mode="json")

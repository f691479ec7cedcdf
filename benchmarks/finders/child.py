"""A child of the benchmark: one finder other than ours, or a few steps at one size, under the case's cap.

Starts and ends as a trial's child does (worker/child/entry.py), from the same fork server, and builds with the same
code, so that all finders have the same memory for the same model, data, precision and optimizer.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from worker.child.isolation import isolate

TRUTH_STEPS = 2  # the first makes the optimizer's state, the second runs with it


def main(request: dict[str, Any], messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Run one request; the last message is result, out_of_memory, or failed."""
    from worker.devices.base import is_out_of_memory

    isolate(lifeline, scratch)
    try:
        last = {"kind": "result", "result": _run(request, messages.send, scratch)}
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        traceback.print_exc()
        kind = "out_of_memory" if is_out_of_memory(error) else "failed"
        last = {"kind": kind, "reason": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
    messages.send(last)
    messages.close()
    sys.stdout.flush()


def _run(request: dict[str, Any], send: Callable[[dict[str, Any]], None], scratch: str) -> dict[str, Any]:
    from service.contract.configuration import Configuration
    from service.contract.job import JobSpec
    from service.contract.paths import Roots
    from worker.child.build import Bundle, Limits, build
    from worker.devices import open_device

    spec = JobSpec.model_validate(request["spec"])
    configuration = Configuration.model_validate(request["configuration"])
    device = open_device(request["device"], request["index"])
    device.limit(int(spec.hardware.memory_gib * 2**30) if spec.hardware.memory_gib else None)
    roots = Roots(tuple(Path(root) for root in request["data_roots"]), Path(request["hub_cache"]))
    limits = Limits(roots, Path(request["cache"]))

    def made() -> Bundle:
        return build(spec, configuration, device, limits, spec.training.seed)

    if request["finder"] == "truth":
        return _steps(made(), request["size"])
    if request["finder"] == "idle":
        return _idle(made, device)
    from finders import peers

    return {"found": peers.FINDERS[request["finder"]](made, send, scratch)}


def _idle(made: Callable[[], Any], device: Any) -> dict[str, Any]:
    """What the process still holds when it has trained a step and dropped the model."""
    import gc

    from worker.child import probe

    device.exact_memory(True)
    bundle = made()
    with probe.without_learning(bundle):
        probe.full_step(bundle, 1)
    del bundle
    gc.collect()
    device.reset_peak()  # and with it what an allocator keeps for later
    return {"bytes": device.used()}


def _steps(bundle: Any, size: int) -> dict[str, Any]:
    """Full steps of one size; the out-of-memory error passes through."""
    from worker.child import probe

    with probe.without_learning(bundle):
        peaks = [max(probe.full_step(bundle, size)) for _ in range(TRUTH_STEPS)]
    return {"peak_bytes": max(peaks), "capacity_bytes": bundle.device.capacity()}

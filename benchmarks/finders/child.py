"""A child of the benchmark: one finder other than ours, or a few steps at one size, under the case's cap.

Starts and ends as a trial's child does (worker/child/entry.py), from the same fork server, and builds with the same
code, so that all finders have the same memory for the same model, data, precision and optimizer.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.finders.messages import Ask
    from service.contract.base import Contract

from worker.child.isolation import isolate

TRUTH_STEPS = 2  # the first makes the optimizer's state, the second runs with it


def main(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Run one request; the last message is an answer, an out-of-memory, or a failure."""
    from benchmarks.finders.messages import Answer, Ask
    from service.contract.child import ChildFailed, OutOfMemory
    from service.contract.measurement import Outcome
    from worker.devices.base import is_out_of_memory

    def send(message: Contract) -> None:
        messages.send_bytes(message.model_dump_json().encode())

    isolate(lifeline, scratch)
    try:
        last: Contract = Answer(figures=_run(Ask.model_validate_json(request), send, scratch))
    except Exception as error:  # noqa: BLE001 - the boundary of the process
        traceback.print_exc()
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        short = is_out_of_memory(error)
        last = OutOfMemory(reason=reason) if short else ChildFailed(outcome=Outcome.crashed, reason=reason)
    send(last)
    messages.close()
    sys.stdout.flush()


def _run(request: Ask, send: Callable[[Contract], None], scratch: str) -> dict[str, int]:
    from worker.child.build import Bundle, build
    from worker.devices import open_device

    spec, place = request.spec, request.workplace
    device = open_device(place.device, place.index)
    device.limit(int(spec.hardware.memory_gib * 2**30) if spec.hardware.memory_gib else None)

    def made() -> Bundle:
        return build(spec, request.configuration, device, place, spec.training.seed)

    if request.finder == "truth":
        assert request.size is not None
        return _steps(made(), request.size)
    if request.finder == "idle":
        return _idle(made, device)
    from benchmarks.finders import peers

    return {"found": peers.FINDERS[request.finder](made, send, scratch)}


def _idle(made: Callable[[], Any], device: Any) -> dict[str, int]:
    """What the process still holds when it has trained a step and dropped the model."""
    import gc

    from worker.child import probe

    device.exact_memory(True)
    bundle = made()
    with probe.without_learning(bundle):
        probe.full_step(bundle, 1)
    del bundle
    gc.collect()
    device.empty_cache()
    return {"bytes": device.used()}


def _steps(bundle: Any, size: int) -> dict[str, int]:
    """Full steps of one size; the out-of-memory error passes through."""
    from worker.child import probe

    with probe.without_learning(bundle):
        peaks = [probe.full_step(bundle, size).most for _ in range(TRUTH_STEPS)]
    return {"peak_bytes": max(peaks), "capacity_bytes": bundle.device.capacity()}

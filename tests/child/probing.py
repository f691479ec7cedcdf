"""`python -m tests.child.probing MODEL DATA`: memory under a cap, in processes that may run out of it.

Prints a JSON object a case. A process that ran out of memory is not clean, so every case has its own, forked from one
that has imported the libraries and nothing else, as a trial's is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from service.contract.child import ChildMessage, ProbeDone, ProbeStarted
from tests.child import tiny
from worker.child import probe, steps
from worker.child.build import Bundle
from worker.devices.base import is_out_of_memory, proc_status
from worker.devices.cpu import Cpu

ROOM = 160 << 20
EFFECTIVE = 32


def ready(model: str, data: str, **levers: str) -> Bundle:
    """A bundle on the CPU, everything touched once, so that what is imported late is there."""
    spec = tiny.job(Path(model), Path(data), max_length=64, training={"effective_batch_size": EFFECTIVE})
    bundle = tiny.bundle(spec, "full", Cpu(), EFFECTIVE, **levers)
    probe.full_step(bundle, 1)
    return bundle


def error_of(call: Callable[[], object]) -> dict[str, Any]:
    """What a call raised, and what the device says of it."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which one is the answer
        return {"type": type(error).__name__, "text": str(error)[:300], "out_of_memory": is_out_of_memory(error)}
    return {"type": None}


def cap(bundle: Bundle, room: int) -> None:
    """Leave `room` bytes."""
    bundle.device.exact_memory(True)  # returns what is free, so that the cap is where it seems to be
    bundle.device.limit(proc_status()["VmData"] + room)


def affine(model: str, data: str) -> dict[str, Any]:
    """Peaks of micro batches on a line, and again."""
    bundle = ready(model, data)
    bundle.device.limit(None)
    bundle.device.exact_memory(True)
    probe.full_step(bundle, 16)  # some CPUs' kernels keep a buffer of several MB from the first large batch on
    micros = (4, 8, 16, 4, 8, 16)
    peaks = [probe.full_step(bundle, micro).step for micro in micros]
    return {"micros": micros, "peaks": peaks}


def largest(model: str, data: str, batching: str = "padded", room: int = ROOM) -> dict[str, Any]:
    """The probe under a cap, its largest again, and then twice as much."""
    bundle = ready(model, data, batching=batching)
    weights = steps.trained_sum(bundle.model)
    rates = [group["lr"] for group in bundle.optimizer.param_groups]
    cap(bundle, room)
    begun: list[int] = []
    told: list[int] = []

    def send(message: ChildMessage) -> None:
        if isinstance(message, ProbeStarted):
            begun.append(message.micro_batch_size)
        elif isinstance(message, ProbeDone):
            told.append(message.probe.micro_batch_size)

    found = probe.largest(bundle, send)
    answer: dict[str, Any] = {
        "largest": found.largest,
        "predicted": found.predicted,
        "limited_by": found.limited_by,
        "probes": [one.micro_batch_size for one in found.probes],
        "peak": max(one.peak_bytes for one in found.probes if one.peak_bytes),
        "capacity": bundle.device.capacity(),
        "begun": begun,
        "told": told,
        "same_weights": steps.trained_sum(bundle.model) == weights,
        "same_rates": rates == [group["lr"] for group in bundle.optimizer.param_groups],
    }
    bundle.device.exact_memory(True)
    answer["again"] = error_of(lambda: probe.full_step(bundle, found.largest))
    answer["twice"] = error_of(lambda: probe.full_step(bundle, 2 * found.largest + 2))
    return answer


def packed(model: str, data: str) -> dict[str, Any]:
    """The same for packed rows."""
    return largest(model, data, "packed")


def roomy(model: str, data: str) -> dict[str, Any]:
    """Without a tight cap the effective batch limits."""
    return largest(model, data, room=8 << 30) | {"twice": None}


def above(model: str, data: str) -> dict[str, Any]:
    """Allocations on both sides of the cap, and errors that are no shortage of memory."""
    bundle = ready(model, data)
    cap(bundle, ROOM)
    return {
        "below": error_of(lambda: torch.ones(ROOM // 2 // 4)),
        "above": error_of(lambda: torch.ones((ROOM + (16 << 20)) // 4)),
        "python": error_of(lambda: bytearray(2 * ROOM)),
        "shapes": error_of(lambda: torch.ones(2, 3) @ torch.ones(2, 3)),
        "index": error_of(lambda: torch.ones(2)[torch.tensor([5])]),
        "inplace": error_of(lambda: torch.ones(2, requires_grad=True).add_(1)),
        "graph": error_of(lambda: torch.ones(2, requires_grad=True).sum().backward(torch.ones(3))),
    }


def main(model: str, data: str) -> None:
    """Run the cases one after the other; exits with a case's error."""
    for case in (affine, largest, packed, roomy, above):
        if (child := os.fork()) == 0:
            print("\n" + json.dumps({case.__name__: case(model, data)}), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"the case {case.__name__} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])

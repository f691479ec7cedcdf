"""The entry of a child process: runs one request under its memory cap and says how it ended.

The child sends JSON messages through a pipe: progress and probes as they come, and last of all a result, an
out-of-memory error, or a failure (service/contract/child.py). What a child cannot report itself (a segmentation
fault, a hang, a kill) its worker sees from outside.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.contract.child import ChildFailed, ChildMessage, ChildRequest, Order, OutOfMemory, Result
    from worker.devices import Device

from worker.child.isolation import isolate

# How a Rust library such as tokenizers panics when memory is short: an allocation that failed, or a thread that the
# system would not start (its stack counts against the cap).
PANIC_WITHOUT_MEMORY = re.compile(r"memory allocation of|Cannot allocate memory|capacity overflow|kind: WouldBlock")
TOO_MANY_RECOMPILES = re.compile(r"FailOnRecompileLimitHit|recompile limit exceeded")
TOO_MANY_SHAPES = (
    "its batches have more shapes than torch keeps compiled code for (torch._dynamo.config.recompile_limit)"
)


def main(request: bytes, messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Run one request and send how it ended. `_lock` keeps the device's lock file open while this child lives."""
    isolate(lifeline, scratch)
    warnings.simplefilter("default")
    # A Rust library that panics because memory is short would hang while it collects a backtrace, which needs memory.
    os.environ["RUST_BACKTRACE"] = "0"
    # An empty cache of compiled code, because a warm cache would make compiling look free.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(scratch) / "compile")

    from service.contract.child import doing

    began = time.monotonic()

    def tell(message: ChildMessage) -> None:
        sys.stdout.flush()  # the worker reads what was printed as soon as it has a result
        messages.send_bytes(message.model_dump_json().encode())
        if (what := doing(message)) is not None:  # into the trial's log, with the seconds since its process began
            sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {what}\n")

    def hear() -> Order:
        from service.contract.child import ORDER

        return ORDER.validate_json(messages.recv_bytes())

    tell(_answer(request, tell, hear))
    messages.close()
    sys.stdout.flush()
    sys.stderr.flush()


def _answer(
    request: bytes, tell: Callable[[ChildMessage], None], hear: Callable[[], Order]
) -> Result | OutOfMemory | ChildFailed:
    """Run the request; its result, or the message that describes whatever was raised, is the child's last message.

    This is the boundary of the process, so it also catches what is no `Exception`: a Rust library's panic, and the
    SystemExit of a model's own code that calls `sys.exit`.
    """
    from service.contract.child import REQUEST

    opened: list[Device] = []
    try:
        return _run(REQUEST.validate_json(request), tell, hear, opened)
    except BaseException as error:  # noqa: BLE001 - see above
        # The memory cap is lifted from here on, because composing the message needs a little memory itself.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        return _failure(error, opened)


def _failure(error: BaseException, opened: list[Device]) -> OutOfMemory | ChildFailed:
    """The message for an error: a TrainingError's own verdict, a timeout, a shortage of memory, or else a crash."""
    from service.contract.child import ChildFailed, OutOfMemory
    from service.contract.measurement import Outcome
    from service.text import told_in_short
    from training.errors import TrainingError

    shortage = _shortage_behind(error)
    told = str(shortage or error).encode(errors="replace").decode().strip()
    if isinstance(error, TrainingError) and shortage is None:
        outcome = Outcome.invalid if error.blame in ("job", "configuration") else Outcome.unstable
        whole_job, unsafe = error.blame == "job", error.blame == "memory"
        lacks = getattr(error, "lacks", {})
        return ChildFailed(outcome=outcome, reason=told, whole_job=whole_job, unsafe=unsafe, lacks=lacks)
    if isinstance(error, TimeoutError) and shortage is None:
        return ChildFailed(outcome=Outcome.timed_out, reason=told)
    traceback.print_exception(error)
    if TOO_MANY_RECOMPILES.search(f"{type(error).__name__}: {error}"):
        return ChildFailed(outcome=Outcome.invalid, reason=TOO_MANY_SHAPES)
    if shortage is not None:
        used, others = _memory_of(opened)
        reason = told_in_short(told) or type(shortage).__name__
        return OutOfMemory(reason=reason, used_bytes=used, others_bytes=others)
    return ChildFailed(outcome=Outcome.crashed, reason=f"{type(error).__name__}: {told_in_short(told)}")


def _shortage_behind(error: BaseException) -> BaseException | None:
    """The shortage of memory that an error is, or that it was raised for; None where memory did not run out.

    Whoever catches all errors of a step, such as reading a file, says that the step failed: our own sentences for a
    user's mistakes do, and so do transformers'. With a small cap, any of those steps may be where memory runs out.
    """
    seen: BaseException | None = error
    while seen is not None and not _is_out_of_memory(seen):
        seen = seen.__cause__ or seen.__context__
    return seen


def _is_out_of_memory(error: BaseException) -> bool:
    from worker.devices.base import is_out_of_memory

    if isinstance(error, Exception):
        return is_out_of_memory(error)
    return PANIC_WITHOUT_MEMORY.search(str(error)) is not None


def _memory_of(opened: list[Device]) -> tuple[int | None, int]:
    """(peak bytes of this process until memory ran out, bytes of the GPU that other processes use)."""
    if not opened:
        return None, 0
    device = opened[0]
    return device.peak(), device.used_by_others() if device.has_own_memory else 0


def _run(
    request: ChildRequest,
    tell: Callable[[ChildMessage], None],
    hear: Callable[[], Order],
    opened: list[Device],
) -> Result:
    """Run the request. The opened device is put into `opened`, so that a failure can be reported with its memory."""
    from service.contract.child import Result, RunEstimate, RunSoak, RunTrial
    from service.levers import is_compiled
    from worker.devices import open_device

    place = request.workplace
    if isinstance(request, RunEstimate):
        from worker.child.memory_estimate import estimate

        return Result(estimate=estimate(request.request, request.facts, request.known, place))
    from worker.child import again, measure, soak

    spec = request.spec
    device = open_device(place.device, place.index)
    opened.append(device)
    cap = spec.hardware.memory_gib
    device.limit(int(cap * 2**30) if cap else None)
    if place.job_cache and not (isinstance(request, RunTrial) and is_compiled(request.trial.configuration.levers)):
        # Processes that time no compiling share what they compile. Some kernels, such as cut-cross-entropy's, call
        # torch.compile themselves, and from then on Triton keeps everything that it compiles in this folder, too.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place.job_cache / "compile")
    if isinstance(request, RunTrial):
        measured, bundle = measure.run_trial(
            spec, request.trial, device, place, tell, request.known, request.only_probe
        )
        if request.stays:
            again.stay(Result(measurement=measured), bundle, tell, hear)  # until the worker ends this process
        return Result(measurement=measured)
    if isinstance(request, RunSoak):
        return Result(soak=soak.run_soak(request, device, tell))
    return again.serve(request, device, tell, hear)

"""Runs each request in a child process with its own process group; every way in which it can end becomes an `Ending`.

Children are forked from a server that has imported torch and transformers, so that no child waits for these imports.
The fork server is a child of this process and ends with it, and a running child ends with either of them. A
child's messages are parsed as JSON and never unpickled, because it may run a model's own code.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from service.contract.base import Contract
from service.contract.child import MESSAGE, ChildMessage, EndingKind, Failed, OutOfMemory, Result
from worker.runner import watchdog

SCRATCH = "dynotune-trial-"
OUTPUT = "output.log"  # in the child's scratch folder, which is removed when the child has ended
TAIL_BYTES = 64 << 10  # of the child's output, kept as its log
POLL_SECONDS = 0.2  # between two looks at the time, the memory and `ended`
GRACE_SECONDS = 5.0  # for a process to end after its last message, or after it was killed
MOST_MESSAGE_BYTES = 64 << 20
# What a Rust library such as tokenizers prints before it aborts the process because an allocation failed.
ABORTED_WITHOUT_MEMORY = re.compile(r"memory allocation of \d+ bytes failed")
FINAL = ("result", "out_of_memory", "failed")
# On a GPU without peft and bitsandbytes: importing them initialises CUDA, after which a forked child cannot use it.
PRELOAD = ("torch", "transformers", "transformers.models.auto.modeling_auto", "numpy")
PRELOAD_CPU = (*PRELOAD, "peft", "accelerate")


class _Inherited:
    """A file descriptor that is passed to the child through the fork server when it is pickled."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self.fd),)


def _detach(handle: Any) -> int:
    return int(handle.detach())


@dataclass
class Ending:
    """How a child ended and why. `last` is its final message if it sent one, `seen` its other messages.

    `log` is the end of what it printed.
    """

    kind: EndingKind
    reason: str = ""
    last: Result | OutOfMemory | Failed | None = None
    seen: list[ChildMessage] = field(default_factory=list)
    log: str = ""


class Sandbox:
    """Runs children, one at a time, on a device that has its own memory or, without `own_memory`, uses the host's.

    In the child, `entry` is called, which sends messages of the union `messages`. The fork server imports `preload`,
    by default what a trial needs, and writes what these imports print to `log`.
    """

    def __init__(
        self,
        own_memory: bool,
        entry: str = "worker.child.entry:main",
        messages: TypeAdapter[Any] = MESSAGE,
        preload: tuple[str, ...] | None = None,
        log: Path | None = None,
    ) -> None:
        self._entry, self._messages = entry, messages
        self._context = multiprocessing.get_context("forkserver")
        if preload is None:
            preload = () if not entry.startswith("worker.") else PRELOAD if own_memory else PRELOAD_CPU
        if log is not None:
            os.environ["DYNOTUNE_WORKER_LOG"] = str(log)
        own = entry.partition(":")[0]
        self._context.set_forkserver_preload(["worker.runner.quiet", "service.contract.child", own, *preload])

    def run(
        self,
        request: Contract,
        seconds: float,
        on_message: Callable[[ChildMessage], None],
        ended: Callable[[], bool],
        lock_fd: int | None = None,
        cap_bytes: int | None = None,
    ) -> Ending:
        """Run one request in a child, and say how that ended.

        The child's process group is killed after `seconds`, as soon as `ended()` is true, when it takes more memory
        than its cap, or when it sends something that is no message. The child inherits the device's lock, `lock_fd`.
        """
        messages, theirs = self._context.Pipe(duplex=False)
        their_lifeline, lifeline = self._context.Pipe(duplex=False)
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH))
        inherited = _Inherited(lock_fd) if lock_fd is not None else None
        asked = request.model_dump_json().encode()
        process = self._context.Process(
            target=_enter, args=(self._entry, asked, theirs, their_lifeline, str(scratch), inherited), daemon=False
        )
        started = time.monotonic()
        try:
            process.start()
            theirs.close()
            their_lifeline.close()
            ending = self._watch(process, messages, started + seconds, on_message, ended, cap_bytes)
            ending.log = _tail(scratch / OUTPUT)
            if ending.kind is EndingKind.signal and (said := ABORTED_WITHOUT_MEMORY.search(ending.log)):
                ending.kind, ending.reason = EndingKind.out_of_memory, said[0]
            return ending
        finally:
            _kill_group(process)
            messages.close()
            lifeline.close()
            shutil.rmtree(scratch, ignore_errors=True)

    def _watch(
        self,
        process: Any,
        messages: Any,
        deadline: float,
        on_message: Callable[[ChildMessage], None],
        ended: Callable[[], bool],
        cap_bytes: int | None,
    ) -> Ending:
        seen: list[ChildMessage] = []
        while True:
            if ended():
                return Ending(EndingKind.ended, seen=seen)
            if time.monotonic() > deadline:
                return Ending(EndingKind.timed_out, "it ran past its time limit and was killed", seen=seen)
            if (reason := watchdog.too_much(process.pid, cap_bytes)) is not None:
                return Ending(EndingKind.out_of_memory, reason, seen=seen)
            if messages not in wait([messages, process.sentinel], POLL_SECONDS):
                if process.exitcode is not None:
                    return _by_exit_code(process.exitcode, seen)
                continue
            try:
                message = self._messages.validate_json(messages.recv_bytes(MOST_MESSAGE_BYTES))
            except ValidationError as error:
                return Ending(EndingKind.malformed, _unreadable(error), seen=seen)
            except (EOFError, OSError):
                process.join(GRACE_SECONDS)
                return _by_exit_code(process.exitcode, seen)
            if message.kind in FINAL:
                process.join(GRACE_SECONDS)
                return Ending(EndingKind(message.kind), getattr(message, "reason", ""), message, seen)
            seen.append(message)
            on_message(message)

    def close(self) -> None:
        """End the fork server, so that nothing outlives the worker."""
        from multiprocessing import forkserver

        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _enter(entry: str, request: bytes, messages: Any, lifeline: Any, scratch: str, lock: object) -> None:
    """Runs in the child: import the entry and call it."""
    module, _, name = entry.partition(":")
    getattr(importlib.import_module(module), name)(request, messages, lifeline, scratch, lock)


def _unreadable(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the message"
    return f"its process sent a message that cannot be read ({place}: {first['msg']})"[:300]


def _by_exit_code(code: int | None, seen: list[ChildMessage]) -> Ending:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; the system may have been short of memory" if -code == signal.SIGKILL else ""
        return Ending(EndingKind.signal, f"its process was ended by {name}{hint}", seen=seen)
    return Ending(EndingKind.exit, f"its process ended without a word (exit code {code})", seen=seen)


def _kill_group(process: Any) -> None:
    """Kill what is left of the process group that the child leads since it called worker/child/isolation.py."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # no such group yet, or its id belongs to another process by now
        if process.exitcode is None:
            process.kill()
    process.join(GRACE_SECONDS)


def _tail(path: Path) -> str:
    if not path.exists():  # the child ended before it had opened the file
        return ""
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - TAIL_BYTES))
        return stream.read().decode(errors="replace").replace("\x00", "")  # PostgreSQL's text holds no NUL

"""Runs each request in a child process with its own process group; every way in which it can end becomes an `Ending`.

Children are forked from a server that has imported torch and transformers, so that no child waits for these imports.
The fork server is a child of this process and ends with it, and a running child ends with either of them. A
child's messages are parsed as JSON and never unpickled, because it may run a model's own code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import psutil
from pydantic import TypeAdapter, ValidationError

from service.contract.base import Contract
from service.contract.child import (
    MESSAGE,
    OUTPUT,
    ChildFailed,
    ChildMessage,
    EndingKind,
    Order,
    OutOfMemory,
    Paused,
    Prepared,
    Preparing,
    Result,
    RunAgain,
    RunBlock,
    RunReplay,
    doing,
)
from service.threads import in_daemon
from worker.runner import watchdog
from worker.runner.preload import PRELOAD, PRELOAD_CPU, set_preload

SCRATCH = "dynotune-trial-"
TAIL_BYTES = 64 << 10  # of the child's output, kept as its log
POLL_SECONDS = 0.2  # between two looks at the time, the memory and `ended`
MOST_PREPARING = 86_400.0  # seconds that a first child may download, during which its limit does not count
GRACE_SECONDS = 5.0  # for a process to end after its last message, or after it was killed
MOST_MESSAGE_BYTES = 64 << 20
# What a library prints before it ends the process because an allocation failed: a Rust one such as tokenizers, by a
# signal; bitsandbytes where there is no room for the pages of an optimizer's states, and OpenMP where there is none for
# the stacks of its threads, by an exit code.
ENDED_WITHOUT_MEMORY = re.compile(
    r"memory allocation of \d+ bytes failed|Error out of memory at line \d+ in file .*|"
    r"libgomp: Thread creation failed.*"
)
FINAL = ("result", "out_of_memory", "failed")


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

    `log` is the end of what it printed. One whose result says that it stays is alive, and waits for `Child.again`.
    """

    kind: EndingKind
    reason: str = ""
    last: Result | OutOfMemory | ChildFailed | None = None
    seen: list[ChildMessage] = field(default_factory=list)
    log: str = ""


class Child:
    """A child that is running. It is spoken to through a pipe, and watched until it ends."""

    def __init__(self, process: Any, pipe: Any, scratch: Path, messages: TypeAdapter[Any]) -> None:
        self._process, self._pipe, self._scratch, self._messages = process, pipe, scratch, messages
        self._seen: list[ChildMessage] = []
        self._receiving: Future[bytes] | None = None  # the message that is being received
        self._ending: Ending | None = None
        self._printed = 0  # bytes of its output that belong to former requests

    def order(self, order: Order) -> None:
        """Send an order to a child that waits for one. One that has ended does not get it, which `watch` will say."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send_bytes(order.model_dump_json().encode())

    def again(self, request: RunBlock | RunReplay) -> None:
        """Have a child that stays carry out another request, which is then watched as the one before was."""
        self._seen, self._ending = [], None
        self._printed = (self._scratch / OUTPUT).stat().st_size
        self.order(RunAgain(request=request))

    def until_paused(self, seconds: float, ended: Callable[[], bool], cap_bytes: int | None = None) -> Ending | None:
        """Like `watch`, but return None as soon as a child that trains in turns waits for the next one."""
        return self._until(seconds, lambda _: None, ended, cap_bytes, lambda message: isinstance(message, Paused))

    def watch(
        self,
        seconds: float,
        on_message: Callable[[ChildMessage], None],
        ended: Callable[[], bool],
        cap_bytes: int | None = None,
    ) -> Ending:
        """Wait until the child ends, and say how.

        It has to end after `seconds`, as soon as `ended()` is true, when it takes more memory than its cap or nearly
        all of the disk, or when it sends something that is no message: its process group is then killed. One that was
        ended by SIGTERM, which the worker never sends, counts as ended from outside.
        """
        ending = self._until(seconds, on_message, ended, cap_bytes, lambda _: False)
        assert ending is not None, "without a message to wait for, only its end ends the watch"
        return ending

    def _until(
        self,
        seconds: float,
        on_message: Callable[[ChildMessage], None],
        ended: Callable[[], bool],
        cap_bytes: int | None,
        awaited: Callable[[ChildMessage], bool],
    ) -> Ending | None:
        """Like `watch`, but return None as soon as the child has sent a message that is `awaited`."""
        deadline, stopped = time.monotonic() + seconds, None
        while self._ending is None:
            message = self._next(deadline if stopped is None else stopped + MOST_PREPARING, ended, cap_bytes)
            if message is None:
                continue
            if isinstance(message, Preparing) and message not in self._seen:
                stopped = time.monotonic()
            elif isinstance(message, Prepared) and stopped is not None:
                deadline, stopped = deadline + time.monotonic() - stopped, None
            self._seen.append(message)
            on_message(message)
            if awaited(message):
                return None
        ending = self._ending
        if ending.kind not in FINAL:
            _kill_group(self._process)  # or it would go on using the device while others are measured
        ending.log = _tail(self._scratch / OUTPUT, self._printed)
        by_itself = ending.kind in (EndingKind.signal, EndingKind.exit)
        if by_itself and (said := ENDED_WITHOUT_MEMORY.search(ending.log)):
            ending.kind, ending.reason = EndingKind.out_of_memory, said[0]
        return ending

    def _next(self, deadline: float, ended: Callable[[], bool], cap_bytes: int | None) -> ChildMessage | None:
        """The next message; None when there is none yet, or when the child has ended, which sets `_ending`."""
        self._ending = self._ended_from_outside(deadline, ended, cap_bytes)
        if self._ending is not None:
            return None
        if self._receiving is not None or self._pipe in wait([self._pipe, self._process.sentinel], POLL_SECONDS):
            return self._read()
        # A process that ends just after the wait has given up may have sent its last message by now.
        if self._process.exitcode is not None and not self._pipe.poll():
            self._ending = _by_exit_code(self._process.exitcode, self._seen)
        return None

    def _ended_from_outside(self, deadline: float, ended: Callable[[], bool], cap_bytes: int | None) -> Ending | None:
        """Why the child has to end now: it was told to, or takes too long, too much memory or too much disk."""
        seen = self._seen
        if ended():
            return Ending(EndingKind.ended, seen=seen)
        if time.monotonic() > deadline:
            said = next((text for one in reversed(seen) if (text := doing(one))), None)
            reason = "it ran past its time limit and was killed" + (f" while {said}" if said else "")
            return Ending(EndingKind.timed_out, reason, seen=seen)
        if (too_much := watchdog.too_much(self._process.pid, cap_bytes)) is not None:
            return Ending(EndingKind.out_of_memory, too_much, seen=seen)
        if (too_much := watchdog.too_much_disk(self._scratch / OUTPUT)) is not None:
            return Ending(EndingKind.out_of_disk, too_much, seen=seen)
        return None

    def _read(self) -> ChildMessage | None:
        process, seen = self._process, self._seen
        if self._receiving is None:  # in a thread, as whoever reads a message waits until all of it is there
            self._receiving = in_daemon(lambda: self._pipe.recv_bytes(MOST_MESSAGE_BYTES), "message of a child")
        try:
            text = self._receiving.result(POLL_SECONDS)
            self._receiving = None
            message: Any = self._messages.validate_json(text)
        except TimeoutError:  # a part of it is there; the child may be ended before it has sent the rest
            return None
        except ValidationError as error:
            self._ending = Ending(EndingKind.malformed, _unreadable(error), seen=seen)
            return None
        except (EOFError, OSError):
            process.join(GRACE_SECONDS)
            self._ending = _by_exit_code(process.exitcode, seen)
            return None
        if message.kind in FINAL:
            if not getattr(message, "stays", False):
                process.join(GRACE_SECONDS)
            self._ending = Ending(EndingKind(message.kind), getattr(message, "reason", ""), message, seen)
            return None
        return cast(ChildMessage, message)


class Sandbox:
    """Runs children on a device that has its own memory or, without `own_memory`, uses the host's.

    In the child, `entry` is called, which sends messages of the union `messages`. The fork server imports `preload`,
    by default what a trial needs, and writes what these imports print to `log`. `capability` is a GPU's.
    """

    def __init__(
        self,
        own_memory: bool,
        entry: str = "worker.child.entry:main",
        messages: TypeAdapter[Any] = MESSAGE,
        preload: tuple[str, ...] | None = None,
        log: Path | None = None,
        capability: tuple[int, int] | None = None,
    ) -> None:
        self._entry, self._messages = entry, messages
        self._output: Path | None = None  # of the child that was started last
        self._context = multiprocessing.get_context("forkserver")
        if preload is None:
            preload = () if not entry.startswith("worker.") else PRELOAD if own_memory else PRELOAD_CPU
        if log is not None:
            os.environ["DYNOTUNE_WORKER_LOG"] = str(log)
        if capability is not None:
            os.environ["DYNOTUNE_GPU_CAPABILITY"] = "{}.{}".format(*capability)
        own = ("worker.runner.fork_server", "worker.child.answers", "service.contract.child", entry.partition(":")[0])
        self._context.set_forkserver_preload([*own, *preload])
        # Where children use CUDA, what was imported is looked at before the first.
        self._set_preload = partial(set_preload, self._context, own, preload) if own_memory and preload else None

    def run(
        self,
        request: Contract,
        seconds: float,
        on_message: Callable[[ChildMessage], None],
        ended: Callable[[], bool],
        lock_fd: int | None = None,
        cap_bytes: int | None = None,
    ) -> Ending:
        """Run one request in a child, and say how that ended. See `Child.watch` for what ends it early."""
        with self.started(request, lock_fd) as child:
            return child.watch(seconds, on_message, ended, cap_bytes)

    @contextlib.contextmanager
    def started(self, request: Contract, lock_fd: int | None = None) -> Iterator[Child]:
        """A child that runs the request; its process group is killed at the end of the context.

        Several may be alive at once. The child inherits the device's lock, `lock_fd`.
        """
        if self._set_preload is not None:
            self._set_preload()
            self._set_preload = None
        pipe, theirs = self._context.Pipe()
        their_lifeline, lifeline = self._context.Pipe(duplex=False)
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH))
        self._output = scratch / OUTPUT
        inherited = _Inherited(lock_fd) if lock_fd is not None else None
        asked = request.model_dump_json().encode()
        process = self._context.Process(
            target=_enter, args=(self._entry, asked, theirs, their_lifeline, str(scratch), inherited), daemon=False
        )
        try:
            process.start()
            theirs.close()
            their_lifeline.close()
            yield Child(process, pipe, scratch, self._messages)
        finally:
            _kill_group(process)
            pipe.close()
            lifeline.close()
            shutil.rmtree(scratch, ignore_errors=True)

    def printed(self) -> str:
        """The end of what the child that was started last has printed so far; empty once it has ended."""
        return _tail(self._output) if self._output is not None else ""

    def forget_output(self) -> None:
        """From now on `printed` returns nothing, until another child is started."""
        self._output = None

    def close(self) -> None:
        """End the fork server, so that nothing outlives the worker."""
        from multiprocessing import forkserver

        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _enter(entry: str, request: bytes, messages: Any, lifeline: Any, scratch: str, lock: object) -> None:
    """Runs in the child: import the entry and call it.

    Garbage is collected from here on, but not looked for among what the fork server has imported.
    """
    gc.freeze()
    gc.enable()
    importlib.import_module("worker.child.answers").ask_again()
    module, _, name = entry.partition(":")
    getattr(importlib.import_module(module), name)(request, messages, lifeline, scratch, lock)


def _unreadable(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the message"
    return f"its process sent a message that cannot be read ({place}: {first['msg']})"[:300]


def _by_exit_code(code: int | None, seen: list[ChildMessage]) -> Ending:
    if code == -signal.SIGTERM:  # from a scheduler, which ends all processes of a worker: no fault of the trial
        return Ending(EndingKind.ended, seen=seen)
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; the system may have been short of memory" if -code == signal.SIGKILL else ""
        return Ending(EndingKind.signal, f"its process was ended by {name}{hint}", seen=seen)
    return Ending(EndingKind.exit, f"its process ended without a word (exit code {code})", seen=seen)


def _kill_group(process: Any) -> None:
    """Kill what is left of the process group that the child leads since it called worker/child/isolation.py.

    While it runs, processes that it has started die too, also those that left the group, unless their own parent has
    ended before.
    """
    if process.pid is None:
        return
    if process.exitcode is None:  # else the id may belong to another process by now
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # no such group yet, or its id belongs to another process by now
        if process.exitcode is None:
            process.kill()
    process.join(GRACE_SECONDS)


def _tail(path: Path, begin: int = 0) -> str:
    """The end of a file from `begin` on, TAIL_BYTES at most, also of one that grows while it is read."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(begin, stream.tell() - TAIL_BYTES))
            return stream.read(TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:  # the child has not opened it yet, or has ended and its folder is gone
        return ""

"""A bench whose children are threads of this process that train on simulated GPUs of one virtual time.

A child is the real entry, spoken to through the real pipe; only the process around it is none. At most one of them
trains at a time, as in a verification, and time goes on for all: a child that waited begins where the one before it
has stopped.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.contract.base import Contract
from service.contract.child import MESSAGE, ORDER, OUTPUT, ChildMessage, Order
from worker.child import entry, passes, soak
from worker.child.build import Bundle, build
from worker.devices.simulated import Simulated, World
from worker.runner import watchdog
from worker.runner.sandbox import Child

Fault = Callable[[Bundle], None]


@dataclass
class _Thread:
    """What `Child` asks of its process."""

    thread: threading.Thread
    sentinel: int
    pid: int = field(default_factory=os.getpid)

    @property
    def exitcode(self) -> int | None:
        return None if self.thread.is_alive() else 0

    def join(self, seconds: float) -> None:
        self.thread.join(seconds)


class Simulation:
    """Stands for a `Sandbox`. `faults` are planted into what soaks of a configuration's key have built."""

    def __init__(self, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.folder = world, folder
        self.now, self.started_count = 0.0, 0
        self.faults: dict[str, Fault] = {}
        self._own = threading.local()
        clock = SimpleNamespace(perf_counter=lambda: self._own.device.host, sleep=lambda _: None)
        monkeypatch.setattr("worker.devices.open_device", self._open)
        monkeypatch.setattr(passes, "time", clock)
        monkeypatch.setattr(soak, "time", clock)
        monkeypatch.setattr(soak, "build", self._faulty)
        # What other programs leave of this machine's memory says nothing of a simulated GPU.
        monkeypatch.setattr(watchdog, "too_much", lambda *_: None)

    @contextlib.contextmanager
    def started(self, request: Contract, lock_fd: int | None = None) -> Iterator[Child]:
        """A child that runs the request in a thread; it has ended at the end of the context."""
        ours, theirs = multiprocessing.Pipe()
        over, end = os.pipe()
        asked = request.model_dump_json().encode()
        scratch = self.folder / f"child-{self.started_count}"
        scratch.mkdir()
        (scratch / OUTPUT).touch()
        self.started_count += 1

        def run() -> None:
            try:
                self._serve(asked, theirs)
            finally:
                theirs.close()
                os.close(end)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Child(_Thread(thread, over), ours, scratch, MESSAGE)
        finally:
            ours.close()
            thread.join()
            os.close(over)

    def _serve(self, asked: bytes, pipe: Any) -> None:
        def tell(message: ChildMessage) -> None:
            self._own.device.synchronize()
            self.now = max(self.now, self._own.device.host)
            pipe.send_bytes(message.model_dump_json().encode())

        def hear() -> Order:
            order = ORDER.validate_json(pipe.recv_bytes())
            device = self._own.device
            device.host = device.device = max(device.host, self.now)
            return order

        try:
            with contextlib.suppress(EOFError, OSError):  # the other end was closed: it has been ended
                tell(entry._answer(asked, tell, hear))
        finally:
            self._own.device.close()

    def _open(self, kind: str, index: int = 0) -> Simulated:
        device = self._own.device = Simulated(index, self.world)
        device.host = device.device = self.now
        return device

    def _faulty(self, spec: Any, configuration: Any, *rest: Any) -> Bundle:
        bundle = build(spec, configuration, *rest)
        if (fault := self.faults.get(configuration.key)) is not None:
            fault(bundle)
        return bundle

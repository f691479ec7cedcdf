"""Trial children for tests: the real sandbox and worker around them, no torch in them.

Each has the signature of worker.child.entry.main.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from service.contract.configuration import Configuration
from tests.factory import block, measured
from worker.child.isolation import isolate


def _answer(request: dict[str, Any], messages: Connection) -> None:
    configuration = Configuration.model_validate(
        request["trial"]["configuration"] if request["mode"] == "trial" else request["candidate"]["configuration"]
    )
    made = measured(configuration, 5.0 + int(configuration.key[:2], 16) / 100)
    if request["mode"] == "block":
        result = block(made, made.timing.seconds if made.timing else 1.0, request["block"]).model_dump(mode="json")
    elif request["mode"] == "soak":
        result = {"steps": 4, "worst_case_steps": 2}
    else:
        result = made.model_dump(mode="json")
    messages.send({"kind": "progress", "text": "stub"})
    messages.send({"kind": "result", "result": result})


def quick(request: dict[str, Any], messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Answers at once."""
    isolate(lifeline, scratch)
    _answer(request, messages)


def exclusive(request: dict[str, Any], messages: Connection, lifeline: Connection, scratch: str, lock: object) -> None:
    """Answers, and says if another child is on the device at the same time."""
    isolate(lifeline, scratch)
    inside = Path(os.environ["DYNOTUNE_LOCKS"]) / "inside"
    with (Path(os.environ["DYNOTUNE_LOCKS"]) / "overlaps").open("a") as overlaps:
        try:
            handle = os.open(inside, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            overlaps.write("two at once\n")
        else:
            time.sleep(0.05)  # long enough to be seen by another
            os.close(handle)
            inside.unlink()
    _answer(request, messages)


def segfault(_request: dict[str, Any], messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Dies as a broken kernel would."""
    isolate(lifeline, scratch)
    print("last words", flush=True)
    messages.send({"kind": "probe_started", "micro_batch_size": 4, "phase": "training"})
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(request: dict[str, Any], messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Never ends, and has a child of its own. Says its pids first."""
    isolate(lifeline, scratch)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    messages.send({"kind": "progress", "text": f"{os.getpid()} {child.pid}"})
    threading.Event().wait()


def silent(_request: dict[str, Any], _messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Ends without a word."""
    isolate(lifeline, scratch)
    os._exit(7)


def greedy(request: dict[str, Any], messages: Connection, lifeline: Connection, scratch: str, lock: object) -> None:
    """The real child, on the real device under its real cap, but for a trial that allocates without end."""
    import torch

    from worker.child import entry, measure

    def allocate(*_: object) -> None:
        messages.send({"kind": "probe_started", "micro_batch_size": 1, "phase": "training"})
        kept = []
        while True:
            kept.append(torch.ones(1 << 22))

    measure.run_trial = allocate  # type: ignore[assignment]
    entry.main(request, messages, lifeline, scratch, lock)


def escaping(request: dict[str, Any], messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """Takes memory where its own cap does not count: shared with a process of its own."""
    isolate(lifeline, scratch)
    messages.send({"kind": "probe_started", "micro_batch_size": 1, "phase": "training"})
    held = mmap.mmap(-1, 1 << 30)  # MAP_SHARED
    for at in range(0, 1 << 30, 4096):
        held[at] = 1
    threading.Event().wait()


def illegal(_request: dict[str, Any], messages: Connection, lifeline: Connection, scratch: str, _lock: object) -> None:
    """A kernel that reads where it must not: torch says so, and the context is lost."""
    from worker.child import entry

    def access(*_: object) -> dict[str, Any]:
        messages.send({"kind": "probe_started", "micro_batch_size": 8, "phase": "training"})
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    entry._run = access  # type: ignore[assignment]
    entry.main(_request, messages, lifeline, scratch, _lock)

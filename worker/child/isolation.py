"""What every child does first: a process group of its own, output to a file, and an end with its worker."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from worker.runner.sandbox import OUTPUT

PR_SET_PDEATHSIG = 1


def isolate(lifeline: Connection, scratch: str) -> None:
    """Lead a process group, write to a file in `scratch`, leave temporary files there, die when the worker does."""
    os.setpgid(0, 0)
    tempfile.tempdir = scratch
    with (Path(scratch) / OUTPUT).open("ab", buffering=0) as stream:
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

"""What every child does first: it leads a process group, writes its output to a file, and dies with its worker."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from service.contract.child import OUTPUT

PR_SET_PDEATHSIG = 1


def isolate(lifeline: Connection, scratch: str) -> None:
    """Lead a process group, send output and temporary files to `scratch`, and die when the worker does.

    `lifeline` is a pipe that the worker never writes to: its end closes when the worker dies.
    """
    os.setpgid(0, 0)
    tempfile.tempdir = scratch
    with (Path(scratch) / OUTPUT).open("ab", buffering=0) as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The kernel kills this child when its parent, the fork server, ends, as that does with the worker. The lifeline
    # does the same on systems without prctl.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        try:
            lifeline.poll(None)
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()

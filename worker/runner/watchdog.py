"""Keeps a trial from taking all of the machine's memory or disk: the worker measures what nothing else limits.

The cap that a child sets for itself limits private memory, in which torch allocates, but neither shared memory nor
the processes that it starts. And a job without a cap may use what was free at its start, part of which other programs
may have taken since.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import psutil

from worker import host

LEAST_AVAILABLE = 0.02  # of the machine: below this the system would soon end processes of its own choice
TOLERATED = 1.05  # times the cap, plus SLACK_BYTES, before a child is ended
SLACK_BYTES = 256 << 20
MOST_OUTPUT_BYTES = 256 << 20  # that a child may print
LEAST_FREE_BYTES = 256 << 20  # of the disk on which a child's temporary files are


def resident(pid: int) -> int:
    """Private and shared bytes of a process and its descendants, mapped files left out; 0 when it has gone."""
    try:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    if len(family) == 1:
        return _bytes(pid, "status", ("RssAnon:", "RssShmem:"))
    # Data loaders share pages with their parent, and proportional set sizes count a shared page once. The kernel takes
    # longer to compute these, so they are read only where there are several processes.
    return sum(_bytes(one, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for one in family)


def _bytes(pid: int, file: str, names: tuple[str, ...]) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


def too_much_disk(output: Path) -> str | None:
    """Why a child has to be ended because of its output file, or of the disk that the file is on; or None.

    It marks the file's folder as in use, so that worker/runner/pruning.py does not delete it.
    """
    with contextlib.suppress(FileNotFoundError):  # the child has not opened it yet, or the folder was cleaned away
        os.utime(output.parent)
        free = shutil.disk_usage(output.parent).free
        if free < LEAST_FREE_BYTES:
            return f"while it ran, only {free >> 20} MiB of disk were left at {output.parent.parent}"
        if output.stat().st_size > MOST_OUTPUT_BYTES:
            return f"it printed more than {MOST_OUTPUT_BYTES >> 20} MiB"
    return None


def too_much(pid: int, cap_bytes: int | None) -> str | None:
    """Why a child has to be ended because of the memory that it, or the whole machine, uses; or None."""
    machine = host.memory()
    if cap_bytes is not None:
        held = resident(pid)
        if held > cap_bytes * TOLERATED + SLACK_BYTES:
            return f"it held {held / 2**30:.2f} GiB of host memory, its cap is {cap_bytes / 2**30:.2f} GiB"
    if machine.available < machine.total * LEAST_AVAILABLE:
        return f"the machine had only {machine.available / 2**30:.2f} GiB left"
    return None

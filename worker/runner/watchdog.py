"""Keeps a trial from taking the machine down: what escapes its own memory cap is seen from outside.

The cap in the child limits private memory, which is where torch allocates. Shared memory and processes that the child
starts are not in it, and a job without a cap has what was free when it began, which others may have taken since.
"""

from __future__ import annotations

from pathlib import Path

import psutil

LEAST_AVAILABLE = 0.02  # of the machine: below this the system would soon end processes of its own choice
TOLERATED = 1.05
SLACK_BYTES = 256 << 20


def resident(pid: int) -> int:
    """Private and shared bytes of a process and its descendants, mapped files left out; 0 when it has gone."""
    try:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    if len(family) == 1:
        return _bytes(pid, "status", ("RssAnon:", "RssShmem:"))
    # Data loaders share their parent's pages: those count once. Reading this takes longer, so only where it matters.
    return sum(_bytes(one, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for one in family)


def _bytes(pid: int, file: str, names: tuple[str, ...]) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


def too_much(pid: int, cap_bytes: int | None) -> str | None:
    """Why a child has to go for the memory it takes, or None."""
    machine = psutil.virtual_memory()
    if cap_bytes is not None:
        held = resident(pid)
        if held > cap_bytes * TOLERATED + SLACK_BYTES:
            return f"it held {held / 2**30:.2f} GiB of host memory, its cap is {cap_bytes / 2**30:.2f} GiB"
    if machine.available < machine.total * LEAST_AVAILABLE:
        return f"the machine had only {machine.available / 2**30:.2f} GiB left"
    return None

"""The memory and the cores that this process may use: the host's, or what its container is allowed of them.

`psutil` and `sched_getaffinity` tell the host's, of which docker's `--memory` and `--cpus` and Kubernetes' limits leave
a part: limits of control groups (Linux kernel documentation, "Control Group v2", and "Memory Resource Controller" of
version 1). A process that goes beyond them is killed, or has to wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
MINE = Path("/proc/self/cgroup")
# Of version 2 and of version 1: the controller, the limit, what is used, and the prefix of the counters in memory.stat.
MEMORY = (
    ("", "memory.max", "memory.current", ""),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory: all that there are, and those that can still be had."""

    total: int
    available: int


def memory() -> Memory:
    """The host's memory, or what the narrowest control group allows of it."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for controller, limit, used, prefix in MEMORY:
        for folder in _folders(controller):
            most = _number(folder / limit)
            if most is not None and most < host.total:
                total = min(total, most)
                available = min(available, max(0, most - (_number(folder / used) or 0) + _reclaimable(folder, prefix)))
    return Memory(total, available)


def cores() -> int:
    """The cores that this process may run on, or as many as its control group may keep busy.

    training/script.py asks for them in fewer lines, as train.py stands alone and is read by its user.
    """
    found = len(os.sched_getaffinity(0))
    for folder in _folders(""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found = min(found, int(quota) // int(period))
    for folder in _folders("cpu"):
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            found = min(found, int(quota) // int(period))
    return max(1, found)


def _folders(controller: str) -> Iterator[Path]:
    """The folders of the control groups that this process is in, from its own outwards.

    In a container the path that the kernel tells may be the host's, while its own group is mounted as the root.
    """
    for line in _text(MINE).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            for mounted in dict.fromkeys((controllers, controller)):
                yield from (GROUPS / mounted / one for one in (group, *group.parents))


def _reclaimable(folder: Path, prefix: str) -> int:
    """The bytes of files that are kept in memory and are given up when memory is short."""
    pairs = (line.split() for line in _text(folder / "memory.stat").splitlines())
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names)


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""

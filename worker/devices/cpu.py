"""The CPU as a device: RLIMIT_DATA is its memory, VmHWM its peak, /proc/stat tells of its neighbours."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path

import psutil
import torch

from worker.devices.base import cpu_reading, proc_status

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BACK = 0.1


class Cpu:
    """Host memory under a cap. Every path of a trial runs here without a GPU."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self._cap = 0
        try:
            self._libc: ctypes.CDLL | None = ctypes.CDLL("libc.so.6")
        except OSError:  # not glibc: memory is then a little less exact
            self._libc = None
        torch.set_num_threads(len(os.sched_getaffinity(0)))

    def limit(self, cap_bytes: int | None) -> None:
        """Cap the process's data segment, so that torch raises a true out-of-memory error."""
        self._cap = cap_bytes or int(psutil.virtual_memory().available * (1 - KEPT_BACK))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (self._cap, hard))

    def capacity(self) -> int:
        """The resident size at which the data segment is full: untouched data (stacks, arenas) counts against it."""
        status = proc_status()
        return self._cap - max(0, status["VmData"] - status["VmRSS"])

    def used_by_others(self) -> int:
        """What the rest of the machine holds."""
        memory = psutil.virtual_memory()
        return max(0, memory.total - memory.available - self.used())

    def used(self) -> int:
        """Resident bytes."""
        return proc_status()["VmRSS"]

    def reset_peak(self) -> None:
        """Reset VmHWM (proc(5), clear_refs 5)."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """VmHWM."""
        return proc_status()["VmHWM"]

    def reserved(self) -> int | None:
        """No caching allocator, so nothing is reserved."""
        return None

    def exact_memory(self, on: bool) -> None:
        """glibc's mmap threshold: low, every tensor is mapped and returned at once; high, as its own steady state."""
        if self._libc is None:
            return
        self._libc.mallopt(M_MMAP_THRESHOLD, 65536 if on else 32 << 20)
        self._libc.mallopt(M_TRIM_THRESHOLD, 65536 if on else 64 << 20)
        self._libc.malloc_trim(0)

    def synchronize(self) -> None:
        """CPU kernels have ended when they return."""

    def mark(self) -> float:
        """Wall-clock."""
        return time.perf_counter()

    def between(self, first: float, last: float) -> float:
        """Seconds between two marks."""
        return last - first

    def neighbours(self) -> tuple[float, float, float]:
        """Wall, busy and own CPU seconds."""
        return cpu_reading()

    def others_share(self, first: tuple[float, float, float], last: tuple[float, float, float]) -> float:
        """Busy time that was not ours, over all cores. /proc/stat ticks are 10 ms, so short spans are rough."""
        wall, busy, own = (after - before for before, after in zip(first, last, strict=True))
        cores = os.cpu_count() or 1
        return min(1.0, max(0.0, busy - own) / (wall * cores)) if wall > 0 else 0.0

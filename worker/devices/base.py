"""What a trial needs of a device. Bytes and seconds throughout."""

from __future__ import annotations

import contextlib
import os
import re
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

# How allocators and libraries say that memory is short. oneDNN only says that it could not create something
# (huggingface/accelerate's finder died on it), so it counts on the CPU, where nothing else makes it say so here.
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|out of memory|DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
    r"could not create a primitive|could not create a memory object|std::bad_alloc|Cannot allocate memory",
    re.IGNORECASE,
)


class Device(Protocol):
    """One accelerator, as the child sees it."""

    torch: torch.device

    def limit(self, cap_bytes: int | None) -> None:
        """Set the memory cap; None means what is free now, a little kept back."""

    def capacity(self) -> int:
        """The peak, as `peak` measures it, at which memory runs out."""

    def used_by_others(self) -> int:
        """Bytes of the device that other processes hold."""

    def used(self) -> int:
        """Bytes held now, as `peak` counts them."""

    def live(self) -> int:
        """Bytes that the program itself holds now, without what an allocator keeps for later: shows a leak."""

    def retries(self) -> int:
        """How often the allocator had to free its cache to go on; 0 where it has none."""

    def reset_peak(self) -> None:
        """Begin a new peak."""

    def peak(self) -> int:
        """The highest use since `reset_peak`."""

    def reserved(self) -> int | None:
        """What the allocator holds, used or not; None where the notion does not exist."""

    def exact_memory(self, on: bool) -> None:
        """Make memory follow what is allocated exactly (slower), for probing; off, for timing."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked."""

    def mark(self) -> Any:
        """A point in device time, without waiting for it."""

    def between(self, first: Any, last: Any) -> float:
        """Seconds between two marks, after `synchronize`."""

    def neighbours(self) -> Any:
        """A reading from which `others_share` tells what others used."""

    def others_share(self, first: Any, last: Any) -> float:
        """The share of the device that went to others between two readings, 0 to 1."""

    def clock(self, reading: Any) -> tuple[int, tuple[str, ...]] | None:
        """A reading's clock in MHz, and why it was lowered; None where the device does not tell."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. An illegal access and the like are not counted as it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and OUT_OF_MEMORY.search(str(error)) is not None


def proc_status() -> dict[str, int]:
    """/proc/self/status in bytes, for the fields that are given in kB."""
    fields = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0]) * 1024
    return fields


def cpu_reading() -> tuple[float, float, float]:
    """(wall, busy seconds of the cores we may use, own CPU seconds). Steal went to others as well, so it is busy."""
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name in ours:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(value) for value in values[:8])
            ticks += user + nice + system + irq + softirq + steal
    busy = ticks / os.sysconf("SC_CLK_TCK")
    own = os.times()
    seconds = own.user + own.system + own.children_user + own.children_system
    for worker in active_children():  # a data loader's, which it sees only when they have ended
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(worker.pid).cpu_times()
            seconds += times.user + times.system
    return time.perf_counter(), busy, seconds

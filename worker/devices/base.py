"""What a trial needs of a device: a class for each kind to derive from. Bytes and seconds throughout."""

from __future__ import annotations

import contextlib
import os
import re
import time
from abc import ABC, abstractmethod
from multiprocessing import active_children
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from service.contract.hardware import HardwareFacts

# How allocators and libraries say that memory is short. oneDNN only says that it could not create something, which here
# it says for no other reason (huggingface/accelerate's finder died on it). cuBLAS is not initialised where its
# workspace does not fit. Where NVML cannot be asked (MIG in containers, Jetson), torch's allocator fails while it puts
# the sentence together (https://github.com/pytorch/pytorch/issues/112377).
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|out.of.memory|DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
    r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_\w*ALLOCATION_FAILED|NVML_SUCCESS == .*CUDACachingAllocator|"
    r"could not create a primitive|could not create a memory object|std::bad_alloc|Cannot allocate memory|"
    r"can't start new thread",
    re.IGNORECASE,
)


class Device(ABC):
    """One device, as a trial's process sees it. Code that depends on the kind of device asks for a capability below.

    `kind` is what jobs ask for under `hardware.device`; `order` is the kind's place among a machine's devices, the
    lowest being the one that a worker takes unasked.
    """

    kind: ClassVar[str]
    order: ClassVar[int] = 100
    has_own_memory: ClassVar[bool] = False
    """It computes in memory of its own; otherwise in the host's, where a job's cap is a cap on the process."""
    first_call_per_shape: ClassVar[bool] = False
    """The first step of each shape of batch is slower than the next, so that it is run once before it is timed."""
    can_pin: ClassVar[bool] = False
    """Batches in page-locked host memory are copied to it faster, and while it computes."""
    runs_ahead: ClassVar[bool] = False
    """Calls return before the device has done what they ask, so that only marks tell the time."""
    gains_from_large_batches: ClassVar[bool] = False
    """Throughput grows with the batch as far as memory goes; elsewhere a few rows keep it busy."""

    torch: torch.device

    @abstractmethod
    def __init__(self, index: int = 0) -> None:
        """Open the device of that number, and set `torch` to what torch calls it."""

    @classmethod
    @abstractmethod
    def found(cls, common: dict[str, Any]) -> list[HardwareFacts]:
        """The facts of every device of this kind on this machine; `common` holds the fields that all devices share."""

    @abstractmethod
    def limit(self, cap_bytes: int | None) -> None:
        """Set the memory cap; None means what is free now, less a little."""

    @abstractmethod
    def capacity(self) -> int:
        """The peak, as `peak` measures it, at which memory runs out."""

    @abstractmethod
    def used_by_others(self) -> int:
        """Bytes of the device that other processes hold."""

    @abstractmethod
    def used(self) -> int:
        """Bytes that this process holds now, counted as `peak` counts them."""

    def empty_cache(self) -> None:  # noqa: B027 - where there is no caching allocator
        """Have a caching allocator give back what it keeps for later, so that the peak follows what is allocated.

        For probing only: steps after it have to ask the device for memory again, which takes time.
        """

    @abstractmethod
    def reset_peak(self) -> None:
        """Forget the peak so far, and change nothing else."""

    @abstractmethod
    def peak(self) -> int:
        """The most bytes that this process held at once since `reset_peak`."""

    def peak_unfreeable(self) -> int | None:
        """Approximately the most bytes since `reset_peak` that freeing a caching allocator's cache could not give back.

        They are what the program holds, and the unused rest of the segments in which it holds something.
        None where there is no such allocator, or it does not tell.
        """
        return None

    def live(self) -> int:
        """Bytes that the program itself holds now, without what an allocator keeps for later: shows a leak."""
        return self.used()

    def retries(self) -> int:
        """How often a caching allocator had to free its cache to go on; 0 where there is none."""
        return 0

    def reserved(self) -> int | None:
        """What a caching allocator holds, used or not; None where there is none."""
        return None

    def exact_memory(self, on: bool) -> None:  # noqa: B027 - where memory is exact at all times
        """Make memory follow exactly what is allocated (slower), for probing; off, for timing."""

    def synchronize(self) -> None:  # noqa: B027 - where calls return when they are done
        """Wait until the device has done all that was asked."""

    def mark(self) -> Any:
        """A point in device time, without waiting for it."""
        return time.perf_counter()

    def between(self, first: Any, last: Any) -> float:
        """Seconds between two marks, after `synchronize`."""
        return float(last - first)

    def neighbours(self) -> Any:
        """A reading from which `others_share` tells what others used."""
        return None

    def others_share(self, first: Any, last: Any) -> float | None:
        """The share of the device that went to others between two readings, 0 to 1; None where it cannot be told."""
        return None

    def has_flash_attention(self, dtype: torch.dtype) -> bool:
        """Whether torch's flash kernel for sdpa computes in this dtype here."""
        del dtype
        return True

    def clock(self, reading: Any) -> tuple[int, tuple[str, ...]] | None:
        """A reading's clock in MHz, and why it was lowered; None where the device does not tell."""
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, as opposed to an illegal access or another defect."""
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
    """(wall-clock seconds, busy seconds of the cores that this process may use, CPU seconds of this process).

    Time that the hypervisor stole went to others as well, so it counts as busy.
    """
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
    for worker in active_children():  # a data loader's, which os.times counts only once they have ended
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(worker.pid).cpu_times()
            seconds += times.user + times.system
    return time.perf_counter(), busy, seconds

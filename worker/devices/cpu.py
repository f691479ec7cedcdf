"""The CPU as a device: RLIMIT_DATA caps its memory, VmHWM gives the peak, /proc/stat what other processes use."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from pathlib import Path
from typing import Any, ClassVar

import torch

from service.contract.hardware import HOST_KEPT_BACK, HardwareFacts
from worker import host
from worker.devices.base import Device, cpu_reading, proc_status

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class _MallInfo2(ctypes.Structure):
    """The structure that mallinfo2(3) returns."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Cpu(Device):
    """Host memory under a cap. Every path of a trial runs here without a GPU."""

    kind = "cpu"
    order = 1000  # last: a machine's accelerator comes first

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cpu")
        self._cap = 0
        try:
            self._libc: ctypes.CDLL | None = ctypes.CDLL("libc.so.6")
            self._libc.mallinfo2.restype = _MallInfo2
        except (OSError, AttributeError):  # no glibc, or one before 2.33: memory is then a little less exact
            self._libc = None
        torch.set_num_threads(host.cores())

    @classmethod
    def found(cls, common: dict[str, Any]) -> list[HardwareFacts]:
        """The host's CPU."""
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
        fields = {name.strip(): value.strip() for name, value in pairs}
        load, cores = os.getloadavg()[0], common["cores"]
        flags = fields.get("flags", fields.get("Features", "")).split()
        facts = HardwareFacts(
            device=cls.kind,
            has_own_memory=cls.has_own_memory,
            name=f"{fields.get('model name', platform.machine())} ({torch.backends.cpu.get_cpu_capability()})",
            memory_bytes=host.memory().total,
            others=(f"load average {load:.1f} on {cores} cores",) if load > 0.5 else (),
            bf16_native=any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16")),
            **common,
        )
        return [facts]

    def limit(self, cap_bytes: int | None) -> None:
        """Cap the process's data segment, so that torch raises a true out-of-memory error.

        Never above what is free now, or the system would end this process, or another one, before the cap does.
        """
        free = int(host.memory().available * (1 - HOST_KEPT_BACK)) + self.used()
        self._cap = min(cap_bytes or free, free)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (self._cap, hard))

    def capacity(self) -> int:
        """The cap, which is on the data segment."""
        return self._cap

    def used_by_others(self) -> int:
        """Bytes of host memory that the rest of the machine holds."""
        memory = host.memory()
        return max(0, memory.total - memory.available - self.used())

    def used(self) -> int:
        """The data segment, which is what the cap limits."""
        return proc_status()["VmData"]

    def live(self) -> int:
        """What malloc has handed out (mallinfo2: arenas and mappings), or the data segment without glibc."""
        if self._libc is None:
            return self.used()
        found = self._libc.mallinfo2()
        return int(found.uordblks + found.hblkhd)

    def reset_peak(self) -> None:
        """Reset VmHWM (proc(5), clear_refs 5)."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """The peak of the data segment.

        The system keeps a peak of resident memory only (VmHWM). Mapped files are in that and not in the data
        segment, untouched data (stacks) the other way round; neither moves within a step.
        """
        status = proc_status()
        return status["VmHWM"] + status["VmData"] - status["VmRSS"]

    def exact_memory(self, on: bool) -> None:
        """Set glibc's mmap threshold: low, each tensor is mapped and given back at once; high, as glibc raises it."""
        if self._libc is None:
            return
        self._libc.mallopt(M_MMAP_THRESHOLD, 65536 if on else 32 << 20)
        self._libc.mallopt(M_TRIM_THRESHOLD, 65536 if on else 64 << 20)
        self._libc.malloc_trim(0)

    def neighbours(self) -> tuple[float, float, float]:
        """Wall-clock, busy and own CPU seconds."""
        return cpu_reading()

    def others_share(self, first: tuple[float, float, float], last: tuple[float, float, float]) -> float:
        """Busy time of other processes over the time of our cores; rough over short spans, in ticks of 10 ms."""
        wall, busy, own = (after - before for before, after in zip(first, last, strict=True))
        cores = len(os.sched_getaffinity(0))
        return min(1.0, max(0.0, busy - own) / (wall * cores)) if wall > 0 else 0.0


DEVICE = Cpu

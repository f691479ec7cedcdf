"""NVML's view of a GPU: who else computes on it, its clock, and why that was lowered.

Source: https://docs.nvidia.com/deploy/nvml-api/, device queries (process utilization, clocks event reasons).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import psutil

# Bits of the clocks event reasons. A power cap (0x04) is how a busy GPU works at its best, so it is not among them.
REASONS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Reading:
    """A point in wall-clock (microseconds, as NVML stamps its samples), the clock in MHz and the reasons' bits."""

    stamp: float
    clock_mhz: int | None = None
    reasons: int = 0

    def slowed_by(self) -> tuple[str, ...]:
        """Why the clock was lowered, in words."""
        return tuple(name for bit, name in REASONS.items() if self.reasons & bit)


class Nvml:
    """One GPU through NVML. What NVML or the machine does not tell is None."""

    def __init__(self, uuid: str | None) -> None:
        """`uuid` as torch has it: CUDA_VISIBLE_DEVICES renumbers devices, so an index would name another one."""
        self._handle = _handle(uuid)

    def is_for_one_process(self) -> bool:
        """Whether the GPU is in the compute mode in which a second process is refused; False where NVML cannot tell."""
        if self._handle is None:
            return False
        import pynvml

        try:
            mode = pynvml.nvmlDeviceGetComputeMode(self._handle)
        except pynvml.NVMLError:
            return False
        return bool(mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)

    def reading(self) -> Reading:
        """The clock and the reasons for lowering it, now."""
        stamp = time.time() * 1e6
        if self._handle is None:
            return Reading(stamp)
        import pynvml

        try:
            clock = int(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
            # Its name before 12.2, which every version still has.
            reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        except pynvml.NVMLError:
            return Reading(stamp)
        return Reading(stamp, clock, reasons)

    def others_share(self, first: Reading, last: Reading) -> float | None:
        """The share of the multiprocessors that other processes used between two readings, or None.

        Of each process the largest share that was sampled counts, and the shares of several add up. Children of the
        same fork server do not count: candidates that take turns are paused in another's turn, but the driver's sample
        at the beginning of a turn still holds the end of the last one.

        1 where the GPU had to lower its clock for heat or for want of power: a timing then says nothing of the GPU.
        None where others cannot be told: without NVML, in a container whose process ids are not the host's, and where
        the driver lists others but not what they use (as under MIG).
        """
        if first.slowed_by() or last.slowed_by():
            return 1.0
        if self._handle is None:
            return None
        import pynvml

        try:
            known = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        except pynvml.NVMLError:
            return None
        if os.getpid() not in known:
            return None
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, int(first.stamp))
        except pynvml.NVMLError:  # no sample since, or not supported here
            return 0.0 if all(map(_takes_turns, known)) else None
        theirs: dict[int, int] = {}
        for one in samples:
            if one.pid != 0 and one.timeStamp <= last.stamp and not _takes_turns(one.pid):
                theirs[one.pid] = max(one.smUtil, theirs.get(one.pid, 0))
        return min(100, sum(theirs.values())) / 100


def _takes_turns(pid: int) -> bool:
    """Whether a process is this one, or another child of the same fork server."""
    try:
        return pid == os.getpid() or psutil.Process(pid).ppid() == os.getppid()
    except psutil.Error:  # it has ended
        return False


def _handle(uuid: str | None) -> Any:
    """NVML's handle of the GPU with that uuid, or None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") if uuid else None
    except (ImportError, OSError):
        return None
    except Exception as error:  # NVMLError's classes are made at run time, so the name is what can be checked
        if type(error).__name__.startswith("NVMLError"):
            return None
        raise

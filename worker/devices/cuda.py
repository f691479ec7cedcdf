"""An NVIDIA GPU as a device: torch's caching allocator, CUDA events, and NVML for what others do on it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

KEPT_BACK = 256 << 20


class Cuda:
    """One GPU. Made in the child only: a process that has touched CUDA cannot be forked."""

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self._cap = 0
        self._others_before = 0
        self._nvml = _nvml_handle(index)

    def limit(self, cap_bytes: int | None) -> None:
        """Cap the allocator; what others hold and the context itself are left out of it."""
        free, total = torch.cuda.mem_get_info(self.torch)
        self._others_before = max(0, total - free - torch.cuda.memory_reserved(self.torch))
        available = free + torch.cuda.memory_reserved(self.torch) - KEPT_BACK
        self._cap = max(1, min(cap_bytes or available, available))
        torch.cuda.set_per_process_memory_fraction(min(1.0, self._cap / total), self.torch)

    def capacity(self) -> int:
        """The cap: torch's allocator fails there."""
        return self._cap

    def used_by_others(self) -> int:
        """Bytes that were taken before this process began, its own context included."""
        return self._others_before

    def used(self) -> int:
        """Reserved bytes, as `peak` counts them."""
        return int(torch.cuda.memory_reserved(self.torch))

    def live(self) -> int:
        """Allocated bytes."""
        return int(torch.cuda.memory_allocated(self.torch))

    def retries(self) -> int:
        """The caching allocator's count."""
        return int(torch.cuda.memory_stats(self.torch).get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        """Begin a new peak, with the cache emptied so that reserved follows allocated."""
        torch.cuda.synchronize(self.torch)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch)

    def peak(self) -> int:
        """Peak reserved: what the device must have, fragmentation included."""
        return int(torch.cuda.max_memory_reserved(self.torch))

    def reserved(self) -> int | None:
        """Reserved bytes."""
        return int(torch.cuda.memory_reserved(self.torch))

    def exact_memory(self, on: bool) -> None:
        """torch's allocator counts exactly at all times."""

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.torch)

    def mark(self) -> torch.cuda.Event:
        """A CUDA event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Device seconds between two events."""
        return float(first.elapsed_time(last)) / 1e3

    def neighbours(self) -> float:
        """A point in wall-clock, in microseconds, as NVML's samples are stamped."""
        return time.time() * 1e6

    def others_share(self, first: float, last: float) -> float:
        """The largest share of the multiprocessors that other processes used since `first`, as NVML samples it."""
        if self._nvml is None:
            return 0.0
        import pynvml

        try:
            known = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._nvml)}
            if os.getpid() not in known:  # NVML sees the host's process ids, not this container's: nobody to tell apart
                return 0.0
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._nvml, int(first))
        except pynvml.NVMLError:  # no sample since, or not supported here
            return 0.0
        return max((sample.smUtil for sample in samples if sample.pid not in (0, os.getpid())), default=0) / 100


def _nvml_handle(index: int) -> Any:
    """NVML's handle of a torch device, matched by UUID because CUDA_VISIBLE_DEVICES renumbers; None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except (ImportError, AttributeError, OSError):
        return None
    except Exception as error:  # NVMLError's classes are made at run time, so the name is what can be checked
        if type(error).__name__.startswith("NVMLError"):
            return None
        raise

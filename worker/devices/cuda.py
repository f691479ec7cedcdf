"""An NVIDIA GPU as a device: torch's caching allocator, CUDA events, and NVML for what others do on it."""

from __future__ import annotations

from typing import Any

import torch

from worker.devices.nvml import Nvml, Reading

KEPT_BACK = 256 << 20


class Cuda:
    """One GPU. Made in the child only: a process that has touched CUDA cannot be forked."""

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(self.torch)
        self._cap = 0
        self._others_before = 0
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        self._nvml = Nvml(str(uuid) if uuid else None)

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

    def neighbours(self) -> Reading:
        """NVML's reading."""
        return self._nvml.reading()

    def others_share(self, first: Reading, last: Reading) -> float:
        """As NVML samples it; all of it while the GPU is throttled."""
        return self._nvml.others_share(first, last)

    def clock(self, reading: Reading) -> tuple[int, tuple[str, ...]] | None:
        """The multiprocessors' clock, and why it was lowered."""
        return None if reading.clock_mhz is None else (reading.clock_mhz, reading.slowed_by())

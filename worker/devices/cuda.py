"""An NVIDIA GPU as a device: torch's caching allocator, CUDA events, and NVML for what others do on it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from service.contract.hardware import HardwareFacts
from service.text import first_line
from worker.devices.base import Device
from worker.devices.nvml import Nvml, Reading

# Of the bytes free when a trial begins, for what CUDA's libraries take outside of torch's allocator, such as kernels
# that load later. Chosen, not measured: with far less, a run could find no room for these; more is lost to the batch.
KEPT_BACK = 256 << 20


class Cuda(Device):
    """One NVIDIA GPU. Opened in the child only: a process that has touched CUDA cannot be forked."""

    kind = "cuda"
    order = 10
    has_own_memory = first_call_per_shape = can_pin = runs_ahead = gains_from_large_batches = True

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device(self.kind, index)
        torch.cuda.set_device(self.torch)
        self._cap = 0
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        self._nvml = Nvml(str(uuid) if uuid else None)

    @classmethod
    def found(cls, common: dict[str, Any]) -> list[HardwareFacts]:
        """Every visible GPU, but for those that have no room for a context, or that another process has for itself.

        RuntimeError where all are left out: a worker would otherwise measure on the host's CPU, which nobody expects.
        """
        there, failure = [], None
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            try:
                there.append(cls._facts(index, common))
            except RuntimeError as error:
                failure, reason = error, first_line(error)
                sys.stderr.write(f"dynotune worker: {cls.kind}:{index} is left out, as it cannot be used ({reason})\n")
        if failure is not None and not there:
            raise failure
        return there

    @classmethod
    def _facts(cls, index: int, common: dict[str, Any]) -> HardwareFacts:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        uuid = str(properties.uuid) if hasattr(properties, "uuid") else None
        return HardwareFacts(
            device=cls.kind,
            has_own_memory=cls.has_own_memory,
            index=index,
            uuid=uuid,
            name=properties.name,
            memory_bytes=total,
            capability=capability,
            for_one_process=Nvml(uuid).is_for_one_process(),
            bf16_native=capability >= (8, 0),
            driver=(_smi("--query-gpu=driver_version", "--format=csv,noheader") or "").partition("\n")[0] or None,
            topology=_smi("topo", "-m") if torch.cuda.device_count() > 1 else None,
            others=(f"{(total - free) / 2**30:.1f} GiB in use by others",) if total - free > 1 << 30 else (),
            **common,
        )

    def limit(self, cap_bytes: int | None) -> None:
        """Cap the allocator; what others hold and the context itself are left out of it."""
        free, total = torch.cuda.mem_get_info(self.torch)
        available = free + torch.cuda.memory_reserved(self.torch) - KEPT_BACK
        self._cap = max(1, min(cap_bytes or available, available))
        torch.cuda.set_per_process_memory_fraction(min(1.0, self._cap / total), self.torch)

    def capacity(self) -> int:
        """The cap, at which torch's allocator fails."""
        return self._cap

    def has_flash_attention(self, dtype: torch.dtype) -> bool:
        """FlashAttention 2 is for 16 bits, on Ampere and newer."""
        return dtype.itemsize == 2 and bool(torch.cuda.get_device_capability(self.torch) >= (8, 0))

    def used_by_others(self) -> int:
        """Bytes in use outside this process's allocator: also its own CUDA context, of half a GiB or so."""
        free, total = torch.cuda.mem_get_info(self.torch)
        return max(0, int(total - free - torch.cuda.memory_reserved(self.torch)))

    def used(self) -> int:
        """Reserved bytes, as `peak` counts them."""
        return int(torch.cuda.memory_reserved(self.torch))

    def live(self) -> int:
        """Bytes that torch's allocator has handed out."""
        return int(torch.cuda.memory_allocated(self.torch))

    def retries(self) -> int:
        """How often torch's allocator freed its cache to go on."""
        return int(torch.cuda.memory_stats(self.torch).get("num_alloc_retries", 0))

    def empty_cache(self) -> None:
        """Give segments that hold no tensor back to the driver."""
        torch.cuda.synchronize(self.torch)
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats(self.torch)

    def peak(self) -> int:
        """Peak reserved: what the device must have, fragmentation included."""
        return int(torch.cuda.max_memory_reserved(self.torch))

    def peak_unfreeable(self) -> int | None:
        """The sum of two peaks, which need not be at the same time: active blocks, and the unused parts of segments.

        None with expandable segments, whose unused parts torch does not count, and with the driver's own allocator.
        """
        if torch.cuda.get_allocator_backend() != "native":
            return None
        if any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
            return None
        stats = torch.cuda.memory_stats(self.torch)
        return int(stats["active_bytes.all.peak"] + stats["inactive_split_bytes.all.peak"])

    def reserved(self) -> int | None:
        """Bytes that torch's allocator holds, used or not."""
        return int(torch.cuda.memory_reserved(self.torch))

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
        """A reading of the clock, through NVML."""
        return self._nvml.reading()

    def others_share(self, first: Reading, last: Reading) -> float | None:
        """The share as NVML samples it, None where it cannot tell, and 1 while the GPU has to lower its clock."""
        return self._nvml.others_share(first, last)

    def clock(self, reading: Reading) -> tuple[int, tuple[str, ...]] | None:
        """The multiprocessors' clock, and why it was lowered."""
        return None if reading.clock_mhz is None else (reading.clock_mhz, reading.slowed_by())


def _smi(*arguments: str) -> str | None:
    """The output of nvidia-smi, or None where it is missing or says nothing."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


DEVICE = Cuda

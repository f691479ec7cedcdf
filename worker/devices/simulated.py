"""A GPU that is simulated: tensors are computed on the CPU, while clock and memory are those of a made-up GPU.

Its truth is known, so that tests hold the timing, the probe and the soak to it. It is never found on a machine, so no
user is offered it. Time is virtual: each operation costs the host a launch and the device what its FLOP or its bytes
take, and the host runs ahead of the device until it waits. What is simulated beside that: a first call of each
operation with other shapes, as cuDNN and autotuning have it; segments of memory, which take time to get; a clock that
is lowered; and other processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from service.contract.hardware import HardwareFacts
from worker.devices.base import Device
from worker.devices.simulated_memory import Allocator

FULL_CLOCK = 1980  # MHz


@dataclass(frozen=True)
class Span:
    """Virtual seconds in which `share` of the device goes to others, or `share` of the clock is lost.

    Others also take `memory_bytes` of the device then.
    """

    begins: float
    ends: float
    share: float
    memory_bytes: int = 0


@dataclass(frozen=True)
class World:
    """What is true of a simulated GPU, in seconds, bytes, and FLOP or bytes a second."""

    memory_bytes: int = 1 << 30
    flops: float = 1e11
    bandwidth: float = 1e11
    launch_seconds: float = 5e-6
    first_call_seconds: float = 0.03
    segment_seconds: float = 1e-3
    others: tuple[Span, ...] = ()
    throttled: tuple[Span, ...] = ()
    drift: float = 0.0  # by what share of its first pace it becomes slower each second; no reading shows it


class Simulated(Device):
    """The simulated GPU. It counts every operation of its process, from when it is opened until it is closed."""

    kind = "simulated"
    order = 1000
    has_own_memory = first_call_per_shape = runs_ahead = gains_from_large_batches = True

    def __init__(self, index: int = 0, world: World | None = None) -> None:
        self.torch = torch.device("cpu")
        self.world = world or World()
        self.memory = Allocator(self.world.memory_bytes, self.used_by_others)
        self.host = self.device = 0.0  # virtual seconds: until when each has work
        self.first_calls = 0.0  # seconds that first calls took, all together
        self._mode = _Operations(self)
        self.open()

    def open(self) -> None:
        """Count from now on, after it was closed."""
        self._mode.__enter__()

    def close(self) -> None:
        """Stop counting."""
        self._mode.__exit__(None, None, None)

    @classmethod
    def found(cls, common: dict[str, Any]) -> list[HardwareFacts]:
        """None: no machine has it."""
        return []

    def launch(self, seconds: float, is_first: bool) -> None:
        """Queue so many seconds of work on the device, behind its earlier work, once the host has launched it."""
        self.host += self.world.launch_seconds
        if is_first:
            self.host = self.device = max(self.host, self.device) + self.world.first_call_seconds
            self.first_calls += self.world.first_call_seconds
        begins = max(self.host, self.device)
        for spans in filter(None, (self.world.others, self.world.throttled)):
            seconds /= 1 - _share(spans, begins, begins)
        seconds *= 1 + self.world.drift * begins
        self.device = begins + seconds

    def pay_for_memory(self, calls: int) -> None:
        """The host and the device wait while segments are asked of the device, or given back."""
        if calls:
            self.host = max(self.host, self.device) + calls * self.world.segment_seconds

    def limit(self, cap_bytes: int | None) -> None:
        """Cap the allocator."""
        self.memory.cap = min(cap_bytes or self.world.memory_bytes, self.world.memory_bytes)

    def capacity(self) -> int:
        """The allocator's cap."""
        return self.memory.cap

    def used_by_others(self) -> int:
        """The bytes that others take now."""
        now = max(self.host, self.device)
        return sum(span.memory_bytes for span in self.world.others if span.begins <= now < span.ends)

    def used(self) -> int:
        """Reserved bytes."""
        return self.memory.reserved

    def live(self) -> int:
        """Allocated bytes."""
        return self.memory.allocated

    def retries(self) -> int:
        """How often the allocator freed its cache to go on."""
        return self.memory.retries

    def reserved(self) -> int | None:
        """Reserved bytes."""
        return self.memory.reserved

    def empty_cache(self) -> None:
        """Give unused segments back."""
        calls = self.memory.calls
        self.memory.empty_cache()
        self.pay_for_memory(self.memory.calls - calls)

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self.memory.reset_peak()

    def peak(self) -> int:
        """Peak reserved bytes."""
        return self.memory.peak_reserved

    def peak_unfreeable(self) -> int:
        """The sum of two peaks, as of a real GPU."""
        return self.memory.peak_allocated + self.memory.peak_split

    def synchronize(self) -> None:
        """The host waits for the device."""
        self.host = max(self.host, self.device)

    def mark(self) -> float:
        """The virtual second in which the device has done all that was asked so far."""
        return max(self.host, self.device)

    def neighbours(self) -> float:
        """The virtual second."""
        return max(self.host, self.device)

    def others_share(self, first: float, last: float) -> float:
        """The share that others used between two readings; 1 where the clock was lowered, as for a real GPU."""
        return 1.0 if _share(self.world.throttled, first, last) else _share(self.world.others, first, last)

    def clock(self, reading: float) -> tuple[int, tuple[str, ...]]:
        """The clock, and why it was lowered."""
        lost = _share(self.world.throttled, reading, reading)
        return round(FULL_CLOCK * (1 - lost)), ("heat",) if lost else ()


class _Operations(TorchDispatchMode):  # type: ignore[misc]
    """Tells the device of every operation, and its allocator of every storage that is made or dies."""

    def __init__(self, device: Simulated) -> None:
        super().__init__()
        self._device = device
        self._storages = WeakIdKeyDictionary()
        self._called: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and let time pass for it. One that only gives another view costs nothing."""
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs.values())]
        made = func(*args, **kwargs)
        results = list(_tensors((made,)))
        calls = self._device.memory.calls
        new = [one for one in results if self._add(one)]
        self._device.pay_for_memory(self._device.memory.calls - calls)
        changes, count = _traits(func)
        if new or changes:
            flops = count(*args, **kwargs, out_val=made) if count else 0
            moved = sum(one.numel() * one.element_size() for one in (*given, *results))
            world, shapes = self._device.world, (func, *(tuple(one.shape) for one in given))
            seconds = max(flops / world.flops, moved / world.bandwidth)
            self._device.launch(seconds, is_first=bool(flops) and shapes not in self._called)
            self._called.add(shapes)
        return made

    def _add(self, tensor: torch.Tensor) -> bool:
        """Allocate a tensor's storage if it is new, until it dies; whether it is."""
        storage = tensor.untyped_storage()
        if storage in self._storages or not storage.nbytes():
            return False
        block = self._device.memory.allocate(storage.nbytes())
        self._storages[storage] = weakref.finalize(storage, self._device.memory.free, block)
        return True


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operation's values, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@cache
def _traits(operation: Any) -> tuple[bool, Any]:
    """(whether it changes what it is given, what counts its FLOP)."""
    return operation._schema.is_mutable, flop_registry.get(operation._overloadpacket)


def _share(spans: tuple[Span, ...], first: float, last: float) -> float:
    """The largest share of the spans that touch the time between two seconds."""
    return max((one.share for one in spans if one.begins <= last and first <= one.ends), default=0.0)


DEVICE = Simulated

"""The simulated GPU's memory: its caching allocator, and what others take of it."""

from __future__ import annotations

import pytest
import torch

from worker.devices.simulated import Simulated, Span, World
from worker.devices.simulated_memory import LARGE_SEGMENT, SMALL_SEGMENT, Allocator

MIB = 1 << 20


def test_the_allocator_keeps_blocks_and_splits_them() -> None:
    memory = Allocator(100 * MIB)
    first, second = memory.allocate(3 * MIB), memory.allocate(1)
    assert (first.size, second.size) == (3 * MIB, 512)
    assert memory.reserved == LARGE_SEGMENT + SMALL_SEGMENT and memory.allocated == 3 * MIB + 512
    memory.free(first)
    assert memory.reserved == LARGE_SEGMENT + SMALL_SEGMENT, "it is kept for the next"
    assert memory.allocate(5 * MIB).segment == first.segment and memory.calls == 2
    assert memory.allocate(30 * MIB).size == 30 * MIB and memory.reserved == 52 * MIB


def test_the_allocator_frees_its_cache_before_it_gives_up() -> None:
    memory = Allocator(64 * MIB)
    big = memory.allocate(40 * MIB)
    memory.free(big)
    assert memory.allocate(50 * MIB).size == 50 * MIB and memory.retries == 1
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        memory.allocate(20 * MIB)


def test_fragments_are_no_room() -> None:
    memory = Allocator(40 * MIB)
    blocks = [memory.allocate(2 * MIB) for _ in range(20)]
    for block in blocks[::2]:
        memory.free(block)
    assert memory.allocated == 20 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(3 * MIB)
    for block in blocks[1::2]:
        memory.free(block)
    assert memory.allocate(LARGE_SEGMENT).size == LARGE_SEGMENT, "free neighbours become one"


def test_what_others_take_is_no_room_while_they_take_it() -> None:
    device = Simulated(world=World(memory_bytes=100 * MIB, others=(Span(0.0, 10.0, 0.0, memory_bytes=60 * MIB),)))
    try:
        assert device.used_by_others() == 60 * MIB
        kept = torch.empty(30 * MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20 * MIB, dtype=torch.uint8)
        device.host = 11.0
        assert device.used_by_others() == 0
        more = torch.empty(20 * MIB, dtype=torch.uint8)
        assert device.live() == kept.nbytes + more.nbytes
    finally:
        device.close()

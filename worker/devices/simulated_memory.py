"""A caching allocator without memory: the blocks, segments and rules of torch's CUDA allocator, as numbers.

Sizes and rules are those of c10/cuda/CUDACachingAllocator.cpp: requests are rounded up to 512 bytes and served from
cached segments, which are split; a segment is asked of the device only when none has room, and freed only when memory
runs out (a retry).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

ROUND, SMALL, SMALL_SEGMENT = 512, 1 << 20, 2 << 20
LARGE_SEGMENT, LEAST_LARGE, ROUND_LARGE = 20 << 20, 10 << 20, 2 << 20


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    segment: int
    start: int
    size: int


@dataclass
class Segment:
    """Memory that was asked of the device at once, with its blocks in their order."""

    size: int
    is_small: bool
    blocks: list[Block] = field(default_factory=list)


class Allocator:
    """Hands out blocks up to `cap` bytes in all segments together; torch.OutOfMemoryError where there is no room.

    Others may have some of the device's `size` bytes, as `used_by_others` tells, which leaves less room than the cap.
    `split` are the bytes that are unused in segments of which something is used, as torch's inactive_split_bytes.
    `calls` counts what was asked of the device (allocations and frees of segments), which is what takes time.
    """

    def __init__(self, size: int, used_by_others: Callable[[], int] = lambda: 0) -> None:
        self.cap = self._size = size
        self._used_by_others = used_by_others
        self.allocated = self.reserved = self.split = self.retries = self.calls = 0
        self.peak_allocated = self.peak_reserved = self.peak_split = 0
        self._segments: dict[int, Segment] = {}
        self._free: dict[bool, set[Block]] = {True: set(), False: set()}  # of small segments, and of large ones
        self._number = 0

    def allocate(self, size: int) -> Block:
        """A block of at least that size."""
        wanted = max(ROUND, -(-size // ROUND) * ROUND)
        is_small = wanted <= SMALL
        block = self._cached(wanted, is_small) or self._new(wanted, is_small)
        before = self._unused(block)
        self._free[is_small].remove(block)
        self._split(block, wanted)
        self._count(block.size, self._unused(block) - before)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache, where it becomes one with free neighbours."""
        size, before = block.size, self._unused(block)
        segment = self._segments[block.segment]
        blocks, free = segment.blocks, self._free[segment.is_small]
        free.add(block)
        at = blocks.index(block)
        for left in (at, at - 1):  # first what follows it, then what is before it
            if 0 <= left < len(blocks) - 1 and free.issuperset(blocks[left : left + 2]):
                free.remove(blocks[left + 1])
                blocks[left].size += blocks.pop(left + 1).size
        self._count(-size, self._unused(block) - before)

    def empty_cache(self) -> None:
        """Give segments that hold no tensor back to the device."""
        for number, segment in list(self._segments.items()):
            free = self._free[segment.is_small]
            if not free.issuperset(segment.blocks):
                continue
            del self._segments[number]
            free.difference_update(segment.blocks)
            self.reserved -= segment.size
            self.calls += 1

    def reset_peak(self) -> None:
        """Begin new peaks."""
        self.peak_allocated, self.peak_reserved, self.peak_split = self.allocated, self.reserved, self.split

    def _unused(self, block: Block) -> int:
        """The unused bytes of a block's segment; 0 where nothing of it is used, so that it could be given back."""
        segment = self._segments[block.segment]
        unused = [one for one in segment.blocks if one in self._free[segment.is_small]]
        return sum(one.size for one in unused) if len(unused) < len(segment.blocks) else 0

    def _count(self, allocated: int, split: int) -> None:
        """Add to what is allocated and what is split."""
        self.allocated += allocated
        self.split += split
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_split = max(self.peak_split, self.split)

    def _cached(self, wanted: int, is_small: bool) -> Block | None:
        """The smallest free block of the pool that is large enough, of equal ones the first."""
        fitting = [block for block in self._free[is_small] if block.size >= wanted]
        return min(fitting, key=lambda block: (block.size, block.segment, block.start), default=None)

    def _new(self, wanted: int, is_small: bool) -> Block:
        size = SMALL_SEGMENT if is_small else LARGE_SEGMENT if wanted < LEAST_LARGE else _rounded(wanted)
        room = min(self.cap, self._size - self._used_by_others())
        if self.reserved + size > room:
            self.retries += 1
            self.empty_cache()
        if self.reserved + size > room:
            import torch

            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB (simulated)")
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.calls += 1
        self._number += 1
        block = Block(self._number, 0, size)
        self._segments[self._number] = Segment(size, is_small, [block])
        self._free[is_small].add(block)
        return block

    def _split(self, block: Block, wanted: int) -> None:
        """Cut what is left off, where it is enough for another request of the pool."""
        segment = self._segments[block.segment]
        left = block.size - wanted
        if left >= ROUND if segment.is_small else left > SMALL:
            rest = Block(block.segment, block.start + wanted, left)
            segment.blocks.insert(segment.blocks.index(block) + 1, rest)
            self._free[segment.is_small].add(rest)
            block.size = wanted


def _rounded(size: int) -> int:
    return -(-size // ROUND_LARGE) * ROUND_LARGE

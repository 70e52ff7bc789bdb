"""A model of CUDA's caching allocator: which block a request gets, and what is reserved for it.

It follows c10/cuda/CUDACachingAllocator.cpp: the smallest free block that is large enough, split where the rest is
worth it; else a new segment, or more pages of an expandable one; where the device is full, free segments go back first.
Addresses of segments ascend in the order in which they are made, which the driver is free to do otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from ...errors import InputError, OgcError
from .blocks import Block, Pool, State
from .settings import DEFAULTS, LARGE_SEGMENT, SMALL, UNIT, AllocatorSettings, segment_bytes

ENDLESS = 2**50
"""Bytes of a device without a limit."""


class DeviceFullError(OgcError):
    """The device has no room for a request, not even with all free segments given back."""


class Usage(NamedTuple):
    """Bytes that were asked for, that blocks take, and that segments take of the device."""

    requested: int
    allocated: int
    reserved: int


class CachingAllocator:
    """Blocks of one device, as PyTorch's allocator would hand them out.

    Args:
        settings: those of ``PYTORCH_ALLOC_CONF``.
        device_bytes: that it can reserve; None for no limit.
    """

    def __init__(self, settings: AllocatorSettings = DEFAULTS, device_bytes: int | None = None) -> None:
        if device_bytes is not None and (isinstance(device_bytes, bool) or not isinstance(device_bytes, int)):
            raise InputError(f"device_bytes must be a number of bytes, not {device_bytes!r}")
        if device_bytes is not None and device_bytes < 0:
            raise InputError(f"device_bytes must not be negative, as {device_bytes} is")
        self.settings = settings
        self.device_bytes = ENDLESS if device_bytes is None else device_bytes
        self.now = self.peak = Usage(0, 0, 0)
        self.releases = 0  # how often the device was full
        self.segments: dict[int, Block] = {}  # by address, the first block of each
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._alive: dict[int, Block] = {}
        self._handles = 0
        self._next_address = LARGE_SEGMENT

    def allocate(self, size: int, stream: int = 0) -> int:
        """Hand out a block.

        Args:
            size: bytes; none are allocated for 0.
            stream: blocks are used again on their own stream alone.

        Returns:
            A number by which to free it.

        Raises:
            DeviceFullError: it does not fit.
            InputError: the size is no number of bytes.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InputError(f"the size of an allocation must be a number of bytes, not {size!r}")
        self._handles += 1
        if size:
            rounded = self.settings.rounded(size)
            block = self._found(self._pool(stream, rounded <= SMALL), rounded)
            if self._is_split(block, rounded):
                block.pool.add(block.split(rounded))
            block.state, block.requested = State.ALLOCATED, size
            self._alive[self._handles] = block
            self._count(size, block.size)
        return self._handles

    def free(self, handle: int) -> None:
        """Take a block back, and merge it with the free ones beside it.

        Raises:
            InputError: nothing that is allocated has this number.
        """
        block = self._alive.pop(handle, None)
        if block is None:
            if not (isinstance(handle, int) and 0 < handle <= self._handles):
                raise InputError(f"allocation {handle!r} was never made")
            raise InputError(f"allocation {handle} has no bytes, or was freed before")
        self._count(-block.requested, -block.size)
        block.state, block.requested = State.FREE, 0
        block.pool.add_merged(block)

    def release_cached(self) -> None:
        """Give free segments, and free pages of expandable ones, back to the device, as ``empty_cache`` does."""
        for pool in sorted(self._pools.values(), key=lambda pool: pool.is_small):
            for _, _, block in list(pool.free):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def _pool(self, stream: int, is_small: bool) -> Pool:
        if (stream, is_small) not in self._pools:
            self._pools[stream, is_small] = Pool(is_small)
        return self._pools[stream, is_small]

    def _count(self, requested: int = 0, allocated: int = 0, reserved: int = 0) -> None:
        now = self.now
        self.now = now = Usage(now.requested + requested, now.allocated + allocated, now.reserved + reserved)
        self.peak = Usage(*map(max, now, self.peak))

    def _found(self, pool: Pool, size: int) -> Block:
        """A free block of at least this size, which is in its pool no more."""
        block = self._best_fit(pool, size) or self._new(pool, size)
        if block is None and self._release_enough(pool, size):
            block = self._new(pool, size)
        if block is None:
            self.releases += 1
            self.release_cached()
            block = self._new(pool, size)
        if block is None:
            raise DeviceFullError(
                f"{size} bytes do not fit on a device of {self.device_bytes}, of which {self.now.allocated} are "
                f"allocated and {self.now.reserved} are reserved"
            )
        return block

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        free, most = pool.free, self.settings.max_split_bytes
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        if self.settings.expandable_segments:  # the end of a segment counts with the addresses that it can grow into
            while place + 1 < len(free) and _room(free[place + 1][2]) < _room(free[place][2]):
                place += 1
        found = free[place][0]
        if (size < most <= found) or (size >= most and found >= size + LARGE_SEGMENT):
            return None
        return free.pop(place)[2]

    def _is_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= UNIT
        return size < self.settings.max_split_bytes and rest > SMALL

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A block of new memory, in no pool; None where the device has no room for it."""
        if self.settings.expandable_segments:
            return self._expanded(pool, size)
        whole = segment_bytes(size)
        if self.now.reserved + whole > self.device_bytes:
            return None
        self._count(reserved=whole)
        return self._segment(pool, whole, State.FREE)

    def _segment(self, pool: Pool, size: int, state: State) -> Block:
        address = self._next_address
        self._next_address += size
        self.segments[address] = block = Block(pool, address, address, size, state)
        return block

    def _release(self, block: Block) -> None:
        """Give a segment back."""
        block.pool.remove(block)
        del self.segments[block.segment]
        self._count(reserved=-block.size)

    def _release_enough(self, pool: Pool, size: int) -> bool:
        """Give back as many of the blocks that are never split as a request takes; whether there are enough."""
        if self.settings.max_split_size_mb is None or self.settings.expandable_segments:
            return False
        most = self.settings.max_split_size_mb * 2**20
        wanted = max(size, most)
        place = bisect_left(pool.free, (wanted,))
        if place < len(pool.free):
            self._release(pool.free[place][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= most:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        """More pages of an expandable segment, with the free block before them."""
        block: Block | None = self._lowest(pool, size)
        assert block is not None
        if block.state is State.UNMAPPED:
            block = self._map(block, min(size, block.size))
        while block is not None and block.size < size:
            assert block.behind is not None
            block = self._map(block.behind, min(size - block.size, block.behind.size))
        if block is not None:
            pool.remove(block)
        return block

    def _lowest(self, pool: Pool, size: int) -> Block:
        """Where free and unmapped addresses begin that are enough, the lowest such; in a new segment if need be."""
        for _, block in pool.unmapped:
            if block.before is not None and block.before.state is State.FREE:
                block = block.before
            room = 0
            for other in block.stretch():
                if room >= size or other.state is State.ALLOCATED:
                    break
                room += other.size
            if room >= size:
                return block
        addresses = max(self.device_bytes + self.device_bytes // 8, size)
        block = self._segment(pool, -(-addresses // pool.page) * pool.page, State.UNMAPPED)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Put memory behind the first pages of an unmapped block; returns the free block that they are part of."""
        mapped = -(-size // block.pool.page) * block.pool.page
        if self.now.reserved + mapped > self.device_bytes:
            return None
        block.pool.remove(block)
        if mapped < block.size:
            block.pool.add(block.split(mapped))
        block.state = State.FREE
        self._count(reserved=mapped)
        return block.pool.add_merged(block)

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block."""
        page, pool = block.pool.page, block.pool
        start = -(-(block.address - block.segment) // page) * page + block.segment
        stop = (block.address + block.size - block.segment) // page * page + block.segment
        if start >= stop:
            return
        pool.remove(block)
        if start > block.address:
            first, block = block, block.split(start - block.address)
            pool.add(first)
        if stop < block.address + block.size:
            pool.add(block.split(stop - start))
        block.state = State.UNMAPPED
        self._count(reserved=start - stop)
        block = pool.add_merged(block)
        if block.is_whole:
            pool.remove(block)
            del self.segments[block.segment]


def _room(block: Block) -> int:
    """What a block has and can grow to."""
    behind = block.behind
    return block.size + (behind.size if behind is not None and behind.state is State.UNMAPPED else 0)

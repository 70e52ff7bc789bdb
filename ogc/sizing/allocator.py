"""A model of CUDA's caching allocator, after c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h.

A request gets the smallest free block that is large enough, else a new segment or more pages of an expandable one. On a
full device free segments are released first. Addresses of segments ascend here; the driver may choose others.
"""

from __future__ import annotations

import logging
import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import InputError, OgcError
from ..graph import MIB

log = logging.getLogger(__name__)

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Of the environment; the first that is there counts."""


UNIT = 512
"""Sizes are rounded up to multiples of this."""

SMALL = MIB
"""The largest request that the small pool serves."""

SMALL_SEGMENT = 2 * MIB
"""Segments of the small pool, and pages of its expandable segments."""

LARGE_SEGMENT = 20 * MIB
"""Segments of the large pool for requests below ``SEGMENT_OF_ITS_OWN``, and pages of its expandable segments."""

SEGMENT_OF_ITS_OWN = 10 * MIB
"""Requests from this size on take a segment of their own size, rounded up to multiples of ``ROUNDED_SEGMENT``."""

ROUNDED_SEGMENT = 2 * MIB


@dataclass(frozen=True)
class AllocatorSettings:
    """What ``PYTORCH_ALLOC_CONF`` sets, as far as bytes depend on it.

    Attributes:
        expandable_segments: segments grow by pages.
        max_split_size_mb: larger blocks are never split; None for no limit.
        roundup_power2_divisions: sizes are rounded up to one of so many steps between powers of two; None for none.

    Raises:
        InputError: PyTorch would not take one of them.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    roundup_power2_divisions: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.expandable_segments, bool):
            raise InputError(f"expandable_segments must be True or False, not {self.expandable_segments!r}")
        most, parts = self.max_split_size_mb, self.roundup_power2_divisions
        if most is not None and (not _is_number(most) or most <= LARGE_SEGMENT // MIB):
            raise InputError(f"max_split_size_mb must be a whole number of MiB above 20, not {most!r}")
        if parts is not None and (not _is_number(parts) or parts < 1 or parts & (parts - 1)):
            raise InputError(f"roundup_power2_divisions must be a power of two, such as 8, not {parts!r}")

    @classmethod
    def of_environment(cls) -> AllocatorSettings:
        """The settings of this process; raises InputError where PyTorch would not take one of them."""
        return _settings_of(next((os.environ[name] for name in VARIABLES if os.environ.get(name)), ""))

    @property
    def max_split_bytes(self) -> float:
        """Blocks of so many bytes are not split."""
        return float("inf") if self.max_split_size_mb is None else self.max_split_size_mb * MIB

    def rounded(self, size: int) -> int:
        """Bytes of the block for a request."""
        parts = self.roundup_power2_divisions or 0
        if parts > 1 and size > UNIT * parts:
            step = 1 << (size.bit_length() - parts.bit_length())
            return -(-size // step) * step
        return max(UNIT, -(-size // UNIT) * UNIT)


DEFAULTS = AllocatorSettings()


@lru_cache
def _settings_of(text: str) -> AllocatorSettings:
    """What a text of the environment sets; once for each text, as it may warn."""
    found: dict[str, Any] = {}
    for name, value in re.findall(r"(\w+):(\[.*?\]|[^,]*)", text.replace(" ", "")):
        if name == "expandable_segments":
            found[name] = value.lower() == "true"
        elif name in AllocatorSettings.__dataclass_fields__ and value.isdecimal():
            found[name] = int(value)
        elif name in AllocatorSettings.__dataclass_fields__:
            log.warning("%s=%s is left out of what is predicted of the allocator", name, value)
    return AllocatorSettings(**found)


def segment_bytes(size: int) -> int:
    """Bytes of the new segment for a block that none of the free ones can hold."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < SEGMENT_OF_ITS_OWN:
        return LARGE_SEGMENT
    return -(-size // ROUNDED_SEGMENT) * ROUNDED_SEGMENT


def _is_number(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


class State(IntEnum):
    """What becomes of a block."""

    FREE = 0
    ALLOCATED = 1
    UNMAPPED = 2
    """Addresses of an expandable segment that no memory stands behind."""


class Block:
    """A region of a segment: its address and its bytes, and the blocks beside it."""

    __slots__ = ("address", "before", "behind", "pool", "requested", "segment", "size", "state")

    def __init__(self, pool: Pool, segment: int, address: int, size: int, state: State) -> None:
        self.pool, self.segment, self.address, self.size, self.state = pool, segment, address, size, state
        self.requested = 0
        self.before: Block | None = None
        self.behind: Block | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.behind is None

    def split(self, size: int) -> Block:
        """Leave so many bytes here; the rest is a block behind this one, in the same state."""
        rest = Block(self.pool, self.segment, self.address + size, self.size - size, self.state)
        rest.before, rest.behind = self, self.behind
        if rest.behind is not None:
            rest.behind.before = rest
        self.behind, self.size = rest, size
        return rest

    def absorb(self) -> None:
        """Take in the block behind this one."""
        taken = self.behind
        assert taken is not None
        self.size += taken.size
        self.behind = taken.behind
        if self.behind is not None:
            self.behind.before = self

    def region(self) -> Iterator[Block]:
        """This block and those behind it."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.behind


class Pool:
    """Free blocks of one stream, small or large, by size and then address; unmapped ones by address."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        """Take in a block that is free or unmapped."""
        if block.state is State.FREE:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Give out a block."""
        if block.state is State.FREE:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def add_merged(self, block: Block) -> Block:
        """Take in a block with those beside it that are in the same state; returns what they make."""
        if block.before is not None and block.before.state is block.state:
            block = block.before
            self.remove(block)
            block.absorb()
        if block.behind is not None and block.behind.state is block.state:
            self.remove(block.behind)
            block.absorb()
        self.add(block)
        return block


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
    """The blocks of one device that can reserve ``device_bytes``; None for no limit."""

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
        """Hand out a block for so many bytes, and return a number by which to free it; a block is reused on its own
        stream.

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
        """Take a block back, and merge it with its free neighbours; raises InputError for an unknown number."""
        block = self._alive.pop(handle, None)
        if block is None:
            if not (isinstance(handle, int) and 0 < handle <= self._handles):
                raise InputError(f"allocation {handle!r} was never made")
            raise InputError(f"allocation {handle} has no bytes, or was freed before")
        self._count(-block.requested, -block.size)
        block.state, block.requested = State.FREE, 0
        block.pool.add_merged(block)

    def block(self, handle: int) -> Block:
        """The block of an allocation that has bytes and was not freed."""
        return self._alive[handle]

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
            for other in block.region():
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

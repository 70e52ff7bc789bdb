"""Blocks of device memory, and the pools in which the free ones are found."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import IntEnum

from .settings import LARGE_SEGMENT, SMALL_SEGMENT


class State(IntEnum):
    """What becomes of a block."""

    FREE = 0
    ALLOCATED = 1
    UNMAPPED = 2
    """Addresses of an expandable segment that no memory stands behind."""


class Block:
    """A stretch of a segment: its address and its bytes, and the blocks beside it."""

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

    def stretch(self) -> Iterator[Block]:
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

"""The numbers of CUDA's caching allocator, and what its settings make of a request.

Source: c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp (``round_size``, ``get_allocation_size``) and
"Memory management" in PyTorch's notes on CUDA semantics.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...errors import InputError

log = logging.getLogger(__name__)

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Of the environment; the first that is there counts."""

MIB = 2**20

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
        expandable_segments: segments grow by pages instead of being many.
        max_split_size_mb: blocks from so many MiB on are never split; None for no limit.
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
        """The settings that this process has.

        Raises:
            InputError: PyTorch would not take one of them.
        """
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

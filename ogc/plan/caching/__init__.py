"""What CUDA's caching allocator makes of a plan: its rules, the order in which a step allocates, the peaks of both.

The files build on one another in this order: settings, blocks, allocator, requests, peaks.
"""

from .allocator import CachingAllocator, DeviceFullError, Usage
from .peaks import MemoryPeaks, Step, memory_peaks, moves_of, plain_moves
from .requests import Move, Requests, requests
from .settings import AllocatorSettings

__all__ = [
    "AllocatorSettings", "CachingAllocator", "DeviceFullError", "MemoryPeaks", "Move", "Requests", "Step", "Usage",
    "memory_peaks", "moves_of", "plain_moves", "requests",
]  # fmt: skip

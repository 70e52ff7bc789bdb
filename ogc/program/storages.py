"""What is known of storages, as long as they live.

PyTorch keeps the Python object of a storage for as long as the storage lives (since 2.1, c10/core/impl/PyObjectSlot.h):
it is the same object each time, and weak references to it end when the memory is let go of.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

T = TypeVar("T")

ByStorage = WeakKeyDictionary[torch.UntypedStorage, T]
"""A table of storages that live."""


class LiveBytes:
    """How many bytes some storages have, of those that live."""

    def __init__(self) -> None:
        self.bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now on, once."""
        key, size = id(storage), storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._gone, key, size))
            self.bytes += size

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._alive

    def _gone(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self.bytes -= size

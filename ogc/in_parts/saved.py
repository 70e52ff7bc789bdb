"""Counts the bytes that autograd saves in one forward: those of parts, of the rest, of derivatives of gradients.

Where a backward runs inside the forward and is to be differentiated, autograd saves for that what it took out of parts,
too: the plain model holds it once.
"""

from __future__ import annotations

from collections import Counter

import torch

from ..program.program import storage_of
from ..program.tensors import ByStorage
from ..torch_state.private import current_backward


class Saved:
    """The memory that was seen until now."""

    def __init__(self) -> None:
        self.counted: ByStorage[bool] = ByStorage()
        self.of_parts: ByStorage[tuple[Counter[int], set[int]]] = ByStorage()  # by a call; again by backwards

    def by_part(self, tensor: torch.Tensor, again: Counter[int]) -> None:
        """Note what a call of a part saves; ``again`` counts, by its number, what a backward saves of that."""
        storage = storage_of(tensor)
        if storage is not None:
            self.of_parts[storage] = again, set()

    def by_rest(self, tensor: torch.Tensor) -> int:
        """The bytes that are the rest's where that saves a tensor; none if they were counted before."""
        storage = storage_of(tensor)
        if storage is None or self._is_saved_again(storage) or not self.is_new(tensor):
            return 0
        return storage.nbytes()

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was not counted yet; now it is."""
        storage = storage_of(tensor)
        if storage is None or storage in self.counted:
            return False
        self.counted[storage] = True
        return True

    def _is_saved_again(self, storage: torch.UntypedStorage) -> bool:
        """Whether a backward saves what a call of a part has saved."""
        known, number = self.of_parts.get(storage), current_backward()
        if known is None or number == -1:
            return False
        again, backwards = known
        if number not in backwards:
            backwards.add(number)
            again[number] += storage.nbytes()
        return True

"""How tensors are laid out in memory."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """The shape of a tensor and its strides in entries."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """That of a tensor."""
        return Layout(tuple(tensor.shape), tensor.stride())

    @staticmethod
    def usual(tensor: torch.Tensor) -> Layout:
        """That of a gradient for a tensor unless there is a reason for another one: its own, without gaps."""
        return Layout.of(tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta"))

    def zeros(self, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """A tensor that is laid out so."""
        if device == "meta":
            return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
        entries = torch.zeros(self.span, dtype=dtype, device=device)
        return entries.as_strided(self.shape, self.strides)

    def is_like(self, other: Layout) -> bool:
        """Whether a tensor of the same shape lies in memory as one of the other layout does."""
        axes = zip(self.shape, self.strides, other.strides, strict=True)
        return all(size == 1 or mine == theirs for size, mine, theirs in axes)

    @property
    def span(self) -> int:
        """Entries of memory from the first to the last one, with the gaps between them."""
        axes = zip(self.shape, self.strides, strict=True)
        return 0 if 0 in self.shape else 1 + sum((size - 1) * stride for size, stride in axes)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is a new tensor's."""
        return self.zeros(torch.float32, "meta").is_contiguous()


@cache
def of_sum(one: Layout, other: Layout) -> Layout:
    """That of the sum of two tensors."""
    return Layout.of(one.zeros(torch.float32, "meta") + other.zeros(torch.float32, "meta"))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers a block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True

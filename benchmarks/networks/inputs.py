"""What an architecture reads. Each kind of input makes a random batch, of its usual size or of another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ogc import InputError


@dataclass(frozen=True)
class Images:
    """Square images, RGB by default: N, channels, size, size."""

    size: int
    channels: int = 3

    def sample(self, batch_size: int, size: int | None = None) -> Tensor:
        return torch.randn(batch_size, self.channels, *[size or self.size] * 2)

    def __str__(self) -> str:
        return f"{self.channels}×{self.size}×{self.size} images"


@dataclass(frozen=True)
class Tokens:
    """Token numbers below ``vocabulary``: N, size."""

    size: int
    vocabulary: int

    def sample(self, batch_size: int, size: int | None = None) -> Tensor:
        return torch.randint(self.vocabulary, (batch_size, size or self.size))

    def __str__(self) -> str:
        return f"{self.size} tokens of {self.vocabulary}"


@dataclass(frozen=True)
class Vectors:
    """Vectors, whose size is the model's: N, size."""

    size: int

    def sample(self, batch_size: int, size: int | None = None) -> Tensor:
        """A batch.

        Raises:
            InputError: another size is asked for than the model's weights have.
        """
        if size not in (None, self.size):
            raise InputError(f"the model reads vectors of {self.size} numbers, not of {size}")
        return torch.randn(batch_size, self.size)

    def __str__(self) -> str:
        return f"vectors of {self.size}"

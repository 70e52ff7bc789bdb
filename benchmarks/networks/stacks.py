"""Plain stacks: many layers in a row, and very many operations in a row."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear_relu(depth: int = 100, width: int = 1024) -> nn.Sequential:
    """``depth`` times a linear layer and a ReLU: N, width to N, width."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


class Additions(nn.Module):
    """A hundred additions of a number, called many times: as many operations, which keep nothing for the backward.

    Any shape to the same shape. There is no memory to save here; what is seen is the cost per operation.
    """

    def __init__(self, calls: int = 1000) -> None:
        super().__init__()
        self.calls = calls
        self.number = nn.Parameter(torch.tensor(1e-3))

    def hundred(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = x + self.number
        return x

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.hundred(x)
        return x

"""Plain stacks: many layers in a row, very many operations in a row, and blocks that compute next to nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear_relu(depth: int = 100, width: int = 1024) -> nn.Sequential:
    """``depth`` times a linear layer and a ReLU: N, width to N, width."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


class SmallBlock(nn.Module):
    """Three 1×1 convolutions, each with batch norm and ReLU, added to the input: N, C, H, W to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for _ in range(3):
            self.layers.append(nn.Conv2d(channels, channels, 1, bias=False))
            self.layers.append(nn.BatchNorm2d(channels))
            self.layers.append(nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def small_blocks(depth: int = 16, channels: int = 4) -> nn.Sequential:
    """Residual blocks so small that the host is what takes time: N, channels, H, W to the same."""
    return nn.Sequential(*(SmallBlock(channels) for _ in range(depth)))


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

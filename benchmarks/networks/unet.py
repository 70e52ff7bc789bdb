"""U-Net of Ronneberger, Fischer & Brox, MICCAI 2015 (arXiv 1505.04597), as it is trained today.

Convolutions are padded, so that the output has the input's size, and followed by batch norm. Shapes are written
N, C, H, W; H and W are multiples of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def double_convolution(channels: int, out: int) -> nn.Sequential:
    """3×3 convolution, batch norm and ReLU, twice: N, C, H, W to N, out, H, W."""
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )


class Up(nn.Module):
    """Doubles the size, halves the channels and reads the features of that size from the way down."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        self.convolutions = double_convolution(channels, channels // 2)

    def forward(self, x: Tensor, across: Tensor) -> Tensor:
        return self.convolutions(torch.cat([across, self.enlarge(x)], dim=1))


class UNet(nn.Module):
    """Four times down, four times up. Input N, 3, H, W; output N, classes, H, W."""

    def __init__(self, channels: int = 64, levels: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels + 1)]
        before = [3, *widths]
        self.down = nn.ModuleList(double_convolution(a, b) for a, b in zip(before, widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(Up(width) for width in reversed(widths[1:]))
        self.classify = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        across = []
        x = images
        for number, down in enumerate(self.down):
            x = down(self.pool(x) if number else x)
            across.append(x)
        x = across.pop()
        for up in self.up:
            x = up(x, across.pop())
        return self.classify(x)

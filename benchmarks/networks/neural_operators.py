"""Fourier neural operators of Li et al., ICLR 2021 (arXiv 2010.08895), in one and in three dimensions.

As their authors' code has them today, with two pointwise layers behind each spectral convolution. Shapes are written
N, C, *S: samples, channels, points of a grid in each dimension.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SpectralConvolution(nn.Module):
    """Multiplies the lowest ``modes`` frequencies in each dimension by weights of their own: N, C, *S to the same."""

    def __init__(self, width: int, modes: int, dims: int) -> None:
        super().__init__()
        self.width, self.modes, self.dims = width, modes, tuple(range(-dims, 0))
        # The last dimension has no negative frequencies; a complex number is two real ones, as optimizers want them.
        self.corners = list(product((False, True), repeat=dims - 1))
        shape = len(self.corners), width, width, *(modes,) * dims, 2
        self.weight = nn.Parameter(torch.randn(shape) / width)

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfftn(x, dim=self.dims)
        result = torch.zeros_like(frequencies)
        for weight, is_negative in zip(torch.view_as_complex(self.weight), self.corners, strict=True):
            ends = (slice(-self.modes, None) if negative else slice(self.modes) for negative in is_negative)
            part = (..., *ends, slice(self.modes))
            result[part] = torch.einsum("ni...,io...->no...", frequencies[part], weight)
        return torch.fft.irfftn(result, s=x.shape[2:], dim=self.dims)


class FourierNeuralOperator(nn.Module):
    """Spectral convolutions, each beside a pointwise one: N, C, *S, values and places on a grid, to N, 1, *S.

    ``hidden`` is how much wider the layer before the last one is.
    """

    def __init__(self, dims: int, channels: int, width: int, modes: int, hidden: int, depth: int = 4) -> None:
        super().__init__()
        pointwise = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]

        def layers(middle: int, out: int) -> nn.Sequential:
            return nn.Sequential(pointwise(width, middle, 1), nn.GELU(), pointwise(middle, out, 1))

        self.lift = pointwise(channels, width, 1)
        self.spectral = nn.ModuleList(
            nn.Sequential(SpectralConvolution(width, modes, dims), layers(width, width)) for _ in range(depth)
        )
        self.beside = nn.ModuleList(pointwise(width, width, 1) for _ in range(depth))
        self.project = layers(hidden * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for number, (spectral, beside) in enumerate(zip(self.spectral, self.beside, strict=True)):
            x = spectral(x) + beside(x)
            if number < len(self.spectral) - 1:
                x = F.gelu(x)
        result: Tensor = self.project(x)
        return result

"""Networks that torchvision does not have, but for those in the files beside this one. Shapes are said of each.

U-Net of Ronneberger, Fischer & Brox, MICCAI 2015 (arXiv 1505.04597), as it is trained today: convolutions are padded
and followed by batch norm. DenseNet-BC for CIFAR of Huang et al., CVPR 2017 (arXiv 1608.06993), that of the first
memory-efficient implementations (Pleiss et al., arXiv 1707.06990). MLP-Mixer of Tolstikhin et al., NeurIPS 2021 (arXiv
2105.01601). Fourier neural operators of Li et al., ICLR 2021 (arXiv 2010.08895), as their authors' code has them today,
with two pointwise layers behind each spectral convolution. Stacks of LSTM layers (Hochreiter & Schmidhuber, 1997), of
linear layers, of additions, and of blocks that compute next to nothing.
"""

from __future__ import annotations

from itertools import pairwise, product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .transformers import Attention, feed_forward


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


class VggUNet(nn.Module):
    """VGG-16's convolutions down, one at each level up, at half of the size: N, 3, H, W to N, classes, H/2, W/2."""

    def __init__(self, classes: int = 51) -> None:
        super().__init__()
        levels = ((3, 64, 2), (64, 128, 2), (128, 256, 3), (256, 512, 3))
        self.down = nn.ModuleList(self._level(*level) for level in levels)
        widths = ((512, 512), (768, 256), (384, 128), (192, 64))
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width)) for before, width in widths
        )
        self.classify = nn.Conv2d(64, classes, 3, padding=1)

    @staticmethod
    def _level(before: int, width: int, count: int) -> nn.Sequential:
        widths = [before, *[width] * count]
        layers = ((nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=True)) for a, b in pairwise(widths))
        return nn.Sequential(*(layer for pair in layers for layer in pair), nn.MaxPool2d(2))

    def forward(self, images: Tensor) -> Tensor:
        across, x = [], images
        for down in self.down:
            x = down(x)
            across.append(x)
        x = across.pop()
        for number, up in enumerate(self.up):
            if number:
                x = torch.cat([F.interpolate(x, scale_factor=2.0), across.pop()], 1)
            x = up(x)
        return self.classify(x)


def densenet_cifar(depth: int = 100, growth: int = 12, classes: int = 10) -> nn.Module:
    """Three dense blocks of bottleneck layers, half of the channels kept between them: N, 3, 32, 32 to N, classes.

    Args:
        depth: convolutions and the linear layer: two for each dense layer, and four more.
        growth: channels that each layer adds.
        classes: outputs.
    """
    from torchvision.models import DenseNet

    layers = (depth - 4) // 6
    model = DenseNet(growth, (layers,) * 3, num_init_features=2 * growth, num_classes=classes)
    # Images are small: no stride, no pooling before the first block.
    del model.features.norm0, model.features.relu0, model.features.pool0
    model.features.conv0 = nn.Conv2d(3, 2 * growth, 3, padding=1, bias=False)
    return model


class MixerLayer(nn.Module):
    """Mixes patches, then channels, each added to its input: N, T, D to the same."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.patch_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches, self.channels = feed_forward(patches, "none", width // 2), feed_forward(width, "none")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.patch_norm(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.channels(self.channel_norm(x))
        return result


class Mixer(nn.Module):
    """Mixer-B/16: N, 3, 224, 224 to N, 1000."""

    def __init__(self, size: int = 224, patch: int = 16, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, stride=patch)
        self.layers = nn.Sequential(*(MixerLayer((size // patch) ** 2, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layers(self.stem(images).flatten(2).transpose(1, 2))
        result: Tensor = self.head(self.norm(x).mean(1))
        return result


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


class LstmLayer(nn.Module):
    """An LSTM and dropout, added to the input: N, T, D to the same."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.lstm(x)[0])


class LstmStack(nn.Module):
    """A language model. Input N, T token numbers; output N, T, vocabulary."""

    def __init__(self, vocabulary: int = 2000, width: int = 256, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(LstmLayer(width, dropout) for _ in range(depth)))
        self.predict = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.predict(self.layers(self.tokens(tokens)))


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


class AttentionBlock(nn.Module):
    """Attention over ``heads`` heads and an MLP, four times as wide. Input and output: N, T, ``width``."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, dropout=0.0, causal=False)
        self.feed_forward = feed_forward(width, "none")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        result: Tensor = x + self.feed_forward(self.norms[1](x))
        return result


class Pointwise(nn.Module):
    """A linear layer and many operations on single elements. Input and output: N, ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        result: Tensor = x + h.tanh() * h.sigmoid().exp().cos()
        return result


class Logits(nn.Module):
    """A causal language model of transformers, called with token numbers alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

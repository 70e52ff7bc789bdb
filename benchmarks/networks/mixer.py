"""MLP-Mixer of Tolstikhin et al., NeurIPS 2021 (arXiv 2105.01601). Shapes: N, T, D: samples, patches, width."""

from __future__ import annotations

from torch import Tensor, nn

from .transformers import feed_forward


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

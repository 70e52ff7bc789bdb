"""Eight families of models at small overheads: what plans that promise +10, +15 and +20 % take, in memory and in time.

    OMP_NUM_THREADS=1 python -m benchmarks.families [SUBJECT ...] --json FILE

The families are those that HiRemate reports on (Gusak et al., ICML 2025: 50 to 70 % less memory at 10 to 15 % more
time), with the widths and sizes of its code (github.com/topal-team/rockmate, models/), where a computer without a GPU
trains them: batches are smaller, ``fno_3d`` has half the width, modes and points in each dimension. GPT-2 reads 512
tokens instead of 100 times 20.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import ogc

from .networks.mixer import Mixer
from .networks.neural_operators import FourierNeuralOperator
from .networks.transformers import Gpt2
from .networks.unet import UNet
from .side_by_side import Forward, Inputs, Way, main, measured, with_loss

OVERHEADS = (0.1, 0.15, 0.2)


def _images(batch: int, size: int = 256) -> Inputs:
    return (torch.randn(batch, 3, size, size),)


def _words(batch: int, tokens: int) -> Inputs:
    return (torch.randint(0, 50257, (batch, tokens)),)


def _grid(batch: int, channels: int, *points: int) -> Inputs:
    return (torch.rand(batch, channels, *points),)


SUBJECTS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "resnet101": lambda: (torchvision.models.resnet101(), _images(4)),
    "regnet_x_32gf": lambda: (torchvision.models.regnet_x_32gf(), _images(2)),
    "unet": lambda: (UNet(32, classes=1), _images(4)),
    "mixer": lambda: (Mixer(256, width=512), _images(4)),
    "transformer": lambda: (nn.Transformer(512, 16), (torch.rand(200, 4, 512), torch.rand(200, 4, 512))),
    "gpt2_small": lambda: (Gpt2(), _words(1, 512)),
    "fno_1d": lambda: (FourierNeuralOperator(1, 2, width=64, modes=16, hidden=2), _grid(256, 2, 256)),
    "fno_3d": lambda: (FourierNeuralOperator(3, 13, width=32, modes=8, hidden=4), _grid(5, 13, 32, 32, 20)),
}


def loss_of(model: nn.Module, inputs: Inputs) -> Callable[[Any], torch.Tensor]:
    """Next words for a language model, squares for all others."""
    if isinstance(model, Gpt2):
        words = inputs[0][:, 1:].flatten()
        return lambda scores: F.cross_entropy(scores[:, :-1].flatten(0, 1), words)
    return lambda result: result.square().mean()


def ways_of(model: nn.Module, inputs: Inputs) -> dict[str, Way]:
    """The plain model, and plans by what they promise."""
    loss = loss_of(model, inputs)

    graph = cache(lambda: ogc.parse(model, inputs, loss=loss))

    def plan(overhead: float) -> tuple[Forward, ogc.Plan]:
        found = ogc.solve(graph(), max_overhead=overhead)
        return partial(with_loss, ogc.apply(model, graph(), found), inputs, loss), found

    ours: dict[str, Way] = {f"ogc, {overhead:+.0%}": partial(plan, overhead) for overhead in OVERHEADS}
    return {"plain": lambda: (partial(with_loss, model, inputs, loss), None), **ours}


if __name__ == "__main__":
    sys.exit(main("benchmarks.families", __doc__, tuple(SUBJECTS), measured(SUBJECTS, ways_of)))

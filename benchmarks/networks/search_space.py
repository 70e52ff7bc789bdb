"""The published table's three search-space networks for CIFAR-10, for the benchmark.

Each is a stem and twenty cells found by architecture search, in the form of Liu, Simonyan & Yang, "DARTS:
Differentiable Architecture Search", ICLR 2019 (arXiv 1806.09055), without auxiliary head and drop path.
The cells: NASNet-A of Zoph et al., CVPR 2018 (arXiv 1707.07012), AmoebaNet-A of Real et al., AAAI 2019
(arXiv 1802.01548), and DARTS, second order. Shapes are written N, C, H, W; H and W are multiples of 4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn


class CellPlan(NamedTuple):
    """What a cell computes. States 0 and 1 are its inputs; each pair, summed, makes the next state.

    Pairs hold (operation, index of the state it reads); ``concat`` are the states that make the output.
    """

    pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    concat: tuple[int, ...]


def _plan(pairs: str, *concat: int) -> CellPlan:
    """``"sep5 1 sep3 0, …"``: each pair's operations and what they read."""
    found = []
    for pair in pairs.split(", "):
        one, reads, other, too = pair.split()
        found.append(((one, int(reads)), (other, int(too))))
    return CellPlan(tuple(found), concat)


NASNET_NORMAL = _plan("sep5 1 sep3 0, sep5 0 sep3 0, avg3 1 skip 0, avg3 0 avg3 0, sep3 1 skip 1", 2, 3, 4, 5, 6)
NASNET_REDUCTION = _plan("sep5 1 sep7 0, max3 1 sep7 0, avg3 1 sep5 0, skip 3 avg3 2, sep3 2 max3 1", 4, 5, 6)
AMOEBANET_NORMAL = _plan("avg3 0 max3 1, sep3 0 sep5 2, sep3 0 avg3 3, sep3 1 skip 1, skip 0 avg3 1", 4, 5, 6)
AMOEBANET_REDUCTION = _plan("avg3 0 sep3 1, max3 0 sep7 2, sep7 0 avg3 1, max3 0 max3 1, conv7 0 sep3 5", 3, 4, 6)
DARTS_NORMAL = _plan("sep3 0 sep3 1, sep3 0 sep3 1, sep3 1 skip 0, skip 0 dil3 2", 2, 3, 4, 5)
DARTS_REDUCTION = _plan("max3 0 max3 1, skip 2 max3 1, max3 0 skip 2, skip 2 max3 1", 2, 3, 4, 5)


class FactorisedReduce(nn.Module):
    """Halves height and width without losing every other pixel: N, C, H, W to N, out, H/2, W/2.

    Two strided 1×1 convolutions make half of the channels each; the second sees the image one pixel on.
    """

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, out - out // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        return self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1))


def relu_conv_norm(channels: int, out: int) -> nn.Module:
    """ReLU, 1×1 convolution, batch norm: N, C, H, W to N, out, H, W."""
    return nn.Sequential(nn.ReLU(), nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out))


def depthwise_separable(channels: int, stride: int, *, kernel: int, dilation: int = 1) -> nn.Sequential:
    """ReLU, depthwise convolution, 1×1 convolution, batch norm: N, C, H, W to N, C, H/stride, W/stride."""
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.BatchNorm2d(channels),
    )


def separable(channels: int, stride: int, *, kernel: int) -> nn.Module:
    """A depthwise separable convolution twice, the stride on the first."""
    return nn.Sequential(
        *depthwise_separable(channels, stride, kernel=kernel), *depthwise_separable(channels, 1, kernel=kernel)
    )


def factorised_seven(channels: int, stride: int) -> nn.Module:
    """A 7×7 convolution as one along the width and one along the height: N, C, H, W to N, C, H/stride, W/stride."""
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(channels, channels, (1, 7), (1, stride), (0, 3), bias=False),
        nn.Conv2d(channels, channels, (7, 1), (stride, 1), (3, 0), bias=False),
        nn.BatchNorm2d(channels),
    )


def average_pool(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def skip(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorisedReduce(channels, channels)


# By channels and stride, all from N, C, H, W to N, C, H/stride, W/stride.
OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "skip": skip,
    "avg3": average_pool,
    "max3": max_pool,
    "sep3": partial(separable, kernel=3),
    "sep5": partial(separable, kernel=5),
    "sep7": partial(separable, kernel=7),
    "dil3": partial(depthwise_separable, kernel=3, dilation=2),
    "conv7": factorised_seven,
}


class Cell(nn.Module):
    """A cell by its plan. Reads the two cells before it, makes ``channels`` for each state of ``plan.concat``.

    Args:
        plan: the operations.
        before_last, last: channels of the outputs of the two cells before.
        channels: of all states of this cell.
        after_reduction: whether the cell before halved height and width, so that the output of the one
            before that has twice its size.
        stride: 2 in a reduction, on the operations that read the cell's inputs, else 1.
    """

    def __init__(
        self, plan: CellPlan, before_last: int, last: int, channels: int, after_reduction: bool, stride: int
    ) -> None:
        super().__init__()
        prepare = FactorisedReduce if after_reduction else relu_conv_norm
        self.prepare_before_last = prepare(before_last, channels)
        self.prepare_last = relu_conv_norm(last, channels)
        edges = [edge for pair in plan.pairs for edge in pair]
        self.operations = nn.ModuleList(OPERATIONS[name](channels, stride if read < 2 else 1) for name, read in edges)
        self.reads = [read for _, read in edges]
        self.concat = plan.concat

    def forward(self, before_last: Tensor, last: Tensor) -> Tensor:
        states = [self.prepare_before_last(before_last), self.prepare_last(last)]
        for k in range(0, len(self.reads), 2):
            first, second = (self.operations[n](states[self.reads[n]]) for n in (k, k + 1))
            states.append(first + second)
        return torch.cat([states[k] for k in self.concat], dim=1)


class SearchSpaceNetwork(nn.Module):
    """Stem, cells with reductions at one and at two thirds of the depth, average pool, linear classifier.

    The stem has three times ``channels``; every reduction doubles those of the cells from there on.
    Input N, 3, H, W; output N, classes.
    """

    def __init__(
        self, normal: CellPlan, reduction: CellPlan, channels: int = 36, depth: int = 20, classes: int = 10
    ) -> None:
        super().__init__()
        before_last = last = 3 * channels
        self.stem = nn.Sequential(nn.Conv2d(3, last, 3, padding=1, bias=False), nn.BatchNorm2d(last))
        self.cells = nn.ModuleList()
        after_reduction = False
        for number in range(depth):
            reduces = number in (depth // 3, 2 * depth // 3)
            plan, stride = (reduction, 2) if reduces else (normal, 1)
            channels *= stride
            self.cells.append(Cell(plan, before_last, last, channels, after_reduction, stride))
            before_last, last, after_reduction = last, len(plan.concat) * channels, reduces
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(last, classes)

    def forward(self, images: Tensor) -> Tensor:
        before_last = last = self.stem(images)
        for cell in self.cells:
            before_last, last = last, cell(before_last, last)
        return self.classifier(self.pool(last).flatten(1))


NETWORKS: dict[str, partial[SearchSpaceNetwork]] = {
    "nasnet_cifar10": partial(SearchSpaceNetwork, NASNET_NORMAL, NASNET_REDUCTION),
    "amoebanet_cifar10": partial(SearchSpaceNetwork, AMOEBANET_NORMAL, AMOEBANET_REDUCTION),
    "darts_cifar10": partial(SearchSpaceNetwork, DARTS_NORMAL, DARTS_REDUCTION),
}

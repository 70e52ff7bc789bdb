"""What compiles: torch.compile with its own budgets for activations beside ogc's plans, as they are and compiled.

    OMP_NUM_THREADS=1 python -m benchmarks.compiled [SUBJECT ...] --json FILE

It needs what torch.compile needs, on a CPU a C++ compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn

import ogc

from .networks.transformers import Attention, feed_forward
from .side_by_side import Forward, Inputs, Way, compiled, main, measured, with_loss

BUDGETS = (0.7, 0.5, 0.3, 0.1)
"""torch.compile's own."""

BUDGET = 0.5
"""Ours: of the plain peak."""


class Block(nn.Module):
    """Attention over ``heads`` heads and an MLP, four times as wide. Input and output: N, T, ``width``."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, dropout=0.0, causal=False)
        self.feed_forward = feed_forward(width, "none")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        result: torch.Tensor = x + self.feed_forward(self.norms[1](x))
        return result


class Pointwise(nn.Module):
    """A linear layer and many operations on single elements. Input and output: N, ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        result: torch.Tensor = x + h.tanh() * h.sigmoid().exp().cos()
        return result


SUBJECTS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "transformer": lambda: (nn.Sequential(*(Block(128) for _ in range(8))), (torch.randn(16, 128, 128),)),
    "pointwise": lambda: (nn.Sequential(*(Pointwise(128) for _ in range(10))), (torch.randn(4096, 128),)),
    "resnet18": lambda: (torchvision.models.resnet18(), (torch.randn(4, 3, 160, 160),)),
}


def ways_of(model: nn.Module, inputs: Inputs) -> dict[str, Way]:
    """By name."""

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    def forward(run: Callable[..., Any]) -> Forward:
        return partial(with_loss, run, inputs, loss)

    def compile(**budget: float) -> tuple[Forward, None]:
        return forward(compiled(model, **budget)), None

    def plan(**wish: Any) -> tuple[Forward, ogc.Plan]:
        optimized: Any = ogc.optimize(model, inputs, memory_budget=BUDGET, loss=loss, **wish)
        return forward(optimized), optimized.plan

    return {
        "plain": lambda: (forward(model), None),
        "compiled": compile,
        **{f"compiled, budget {budget:g}": partial(compile, budget=budget) for budget in BUDGETS},
        "ogc": plan,
        "ogc, compile=True": partial(plan, compile=True),
    }


if __name__ == "__main__":
    sys.exit(main("benchmarks.compiled", __doc__, tuple(SUBJECTS), measured(SUBJECTS, ways_of)))

"""Random models whose own forward stays Python: bit by bit the plain model, and never more memory than expected."""

import random

import pytest
import torch
from helpers import measured_peak, seeds, trace_of_training
from test_in_parts import Block, scaled
from torch import nn

import ogc

WIDTH = 32


class Heavy(torch.autograd.Function):
    """Keeps a tensor that autograd does not know of."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.sine = x.sin()
        return x * ctx.sine * 0.5

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (ctx.sine + x * x.cos()) * 0.5


class Two(nn.Module):
    """Takes two tensors and returns two."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.c = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, y):
        return self.c(torch.tanh(self.a(x)) * torch.sigmoid(self.b(y))), x * 2


def some_module(rng):
    return rng.choice(
        [
            lambda: Block(WIDTH),
            lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)),
            lambda: nn.Sequential(Block(WIDTH), nn.Tanh(), Block(WIDTH)),
        ]
    )()


class RandomModel(nn.Module):
    """Steps of several kinds, some of them parts, some the model's own."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        kinds = ["part", "residual", "two", "scale", "heavy", "relu", "shared", "keep", "branch", "join"]
        self.steps = [rng.choice(kinds) for _ in range(rng.randrange(3, 8))] + ["shared"]
        self.parts = nn.ModuleList(Two() if step == "two" else some_module(rng) for step in self.steps)
        self.last = nn.Linear(WIDTH, 4)
        self.returns_both = rng.random() < 0.3

    def forward(self, x):
        x = kept = scaled(x, 1.0)
        shared = self.parts[-1]
        for step, part in zip(self.steps, self.parts, strict=True):
            if step == "part":
                x = part(x)
            elif step == "residual":
                x = x + part(x)
            elif step == "branch":
                x = part(x) + shared(x).relu()
            elif step == "two":
                x, kept = part(x, kept)
            elif step == "scale":
                x = scaled(x, 1.1)
            elif step == "heavy":
                x = Heavy.apply(x)
            elif step == "relu":
                x = torch.relu(x * 1.0)
            elif step == "shared":
                x = x + shared(x)
            elif step == "keep":
                kept = x
            else:
                x = x + torch.cat([x[:, WIDTH // 2 :], kept[:, : WIDTH // 2]], 1)
        x = scaled(x, 1.0)
        return (self.last(x), kept) if self.returns_both else self.last(x)


SEEDS = [*seeds(2, 6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models_in_parts(seed):
    torch.manual_seed(seed)
    model, x = RandomModel(seed), torch.randn(512, WIDTH, requires_grad=seed % 2 == 0)
    least = ogc.optimize(model, x, memory_budget="least")
    for optimised in (least, ogc.optimize(model, x, max_overhead=0.1)):
        assert isinstance(optimised.plan, ogc.PartsPlan)
        assert measured_peak(optimised, (x,)) <= 1.01 * optimised.plan.peak_bytes
        x.grad = None
        plain, ours = (trace_of_training(model, run, (x,), 1) for run in (model, optimised))
        assert all(map(torch.equal, plain, ours))

"""Backwards for many gradients at once run plans like any other."""

import copy

import pytest
import torch
from helpers import forced
from torch import func, nn

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Network(nn.Sequential):
    """Its low-memory variants write over gradients and split the batch, and its dropout is run again."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3), nn.SiLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3), nn.Tanh(),
        )  # fmt: skip


def by_autograd(y, inputs, create_graph):
    seeds = torch.eye(3)
    return torch.autograd.grad(y, inputs, seeds, create_graph=create_graph, retain_graph=True, is_grads_batched=True)


def by_vmap(y, inputs, create_graph):
    def of_one(seed):
        return torch.autograd.grad(y, inputs, seed, create_graph=create_graph, retain_graph=True)

    return func.vmap(of_one)(torch.eye(3))


def trace(model, run, way, create_graph):
    torch.manual_seed(0)
    model.zero_grad()
    x = X.clone().requires_grad_()
    y = run(x).sum(0)
    found = way(y, (x, *model.parameters()), create_graph)
    last = sum(t.square().sum() for t in found) + y.sum() if create_graph else y.sum()
    last.backward()
    return [y, *found, x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("way", [by_autograd, by_vmap])
@pytest.mark.parametrize("pieces", [1, 3])
def test_they_are_the_plain_models(pieces, way, create_graph):
    torch.manual_seed(0)
    model = Network()
    plain, optimized = copy.deepcopy(model), forced(model, X.clone().requires_grad_(), pieces)
    expected, ours = trace(plain, plain, way, create_graph), trace(model, optimized, way, create_graph)
    assert optimized.report().planned
    assert len(expected) == len(ours)
    assert all(map(torch.equal, expected, ours))

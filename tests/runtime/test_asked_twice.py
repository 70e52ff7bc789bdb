"""Backwards of custom functions that ask for what they saved more than once."""

import pytest
import torch
from helpers import assert_same_training, forced, measured_peak
from torch import nn

import ogc


class Twice(torch.autograd.Function):
    """Saves an argument, a parameter and a value of its own, and asks for each three times."""

    @staticmethod
    def forward(ctx, x, scale):
        y = torch.sin(x)
        ctx.save_for_backward(x, scale, y, x[:, :4])
        return y * scale

    @staticmethod
    def backward(ctx, g):
        x, scale = ctx.saved_tensors[0], ctx.saved_tensors[1]
        _, _, y, part = ctx.saved_tensors
        return g * torch.cos(x) * scale + 0 * part.sum(), (g * y).sum(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(32, 32), nn.Parameter(torch.ones(32))

    def forward(self, x):
        return nn.functional.softplus(Twice.apply(torch.tanh(self.linear(x)), self.scale))


def blocks():
    return nn.Sequential(*(Block() for _ in range(6)))


@pytest.mark.parametrize("repeatable", [None, False], ids=["called again", "called once"])
def test_what_was_saved_may_be_asked_for_again(repeatable, opened):
    model, x = blocks(), torch.randn(128, 32, requires_grad=True)
    optimised = ogc.optimize(model, x, recompute_opaque=repeatable, memory_budget="least")
    assert_same_training(model, optimised, (x,))
    assert opened


def test_where_everything_runs_again():
    model, x = blocks(), torch.randn(128, 32)
    assert_same_training(model, forced(model, x), (x,))


def test_where_the_graph_is_kept():
    model, x = blocks(), torch.randn(128, 32)
    results = []
    for run in (model, ogc.optimize(model, x, memory_budget="least")):
        loss = run(x).square().mean()
        results.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
        results.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.full
def test_it_is_held_no_longer_than_what_is_asked_for_once(monkeypatch):
    x = torch.randn(2048, 32)
    peaks = [measured_peak(ogc.optimize(blocks(), x, memory_budget="least"), (x,))]
    monkeypatch.setattr(Twice, "backward", staticmethod(once))
    peaks.append(measured_peak(ogc.optimize(blocks(), x, memory_budget="least"), (x,)))
    assert peaks[0] == peaks[1] < 0.5 * measured_peak(blocks(), (x,))


def once(ctx, g):
    x, scale, y, part = ctx.saved_tensors
    return g * torch.cos(x) * scale + 0 * part.sum(), (g * y).sum(0)

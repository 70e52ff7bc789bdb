"""Several backwards through one graph: the same gradients, and the memory of a plan in each of them."""

import pytest
import torch
from helpers import measured_peak
from torch import nn

import ogc


def stack(layers=16, width=64, drop=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(drop), nn.Softplus()) for _ in range(layers))
    )


class Losses:
    """Several losses, each run backward after the other."""

    def __init__(self, *losses):
        self.losses = losses

    def backward(self):
        for loss in self.losses[:-1]:
            loss.backward(retain_graph=True)
        self.losses[-1].backward()


def losses(output):
    return Losses(output.square().mean(), output.abs().mean(), output.exp().mean())


def gradients(run, model, x):
    model.zero_grad()
    torch.manual_seed(1)
    losses(run(x)).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("goal", [{}, {"memory_budget": 0.4}, {"max_overhead": 0.1}], ids=str)
def test_gradients_are_the_plain_models(goal):
    model, x = stack(drop=0.2), torch.randn(256, 64)
    optimised = ogc.optimize(model, x, **goal)
    assert any(segment.parts for segment in optimised.plan.segments) or goal
    assert all(map(torch.equal, gradients(optimised, model, x), gradients(model, model, x)))


@pytest.mark.full
def test_each_backward_needs_no_more_than_the_plan():
    model, x = stack(), torch.randn(2048, 64)
    optimised = ogc.optimize(model, x, memory_budget="least")
    once = measured_peak(optimised, (x,))
    several = measured_peak(optimised, (x,), loss=losses)
    assert optimised.plan.peak_bytes < 0.2 * optimised.plan.plain_peak_bytes
    # the losses' own tensors, a few of the size of the output, are there as well
    assert several <= 1.1 * once + 4 * x.numel() * x.element_size()


def test_a_part_of_the_graph_first_and_then_the_whole():
    model, x = stack(), torch.randn(64, 64, requires_grad=True)
    optimised = ogc.optimize(model, x, memory_budget="least")
    found = []
    for run in (model, optimised):
        output = run(x)
        last = torch.autograd.grad(output.sum(), model[-1][0].weight, retain_graph=True)
        all_of_them = torch.autograd.grad(output.sum(), [x, *model.parameters()], retain_graph=True)
        again = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
        found.append([*last, *all_of_them, *again])
    assert all(map(torch.equal, *found))


def test_gradients_of_gradients_of_a_kept_graph():
    model, x = stack(layers=4), torch.randn(16, 64, requires_grad=True)
    optimised = ogc.optimize(model, x, memory_budget="least")
    found = []
    for run in (model, optimised):
        model.zero_grad()
        output = run(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.square().mean() + slope.square().mean()).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))

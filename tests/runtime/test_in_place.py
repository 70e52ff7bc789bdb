"""Activations in place after norms: whatever the plan runs out of place has the gradients of the plain model's."""

import random

import pytest
import torch
from helpers import Function, assert_same_training, measured_peak, random_tree, random_values
from torch import nn

import ogc
from ogc.torch_state.allocator import peak_bytes

X = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(2))


ACTIVATIONS = {
    "relu": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(inplace=True),
    "leaky relu": nn.LeakyReLU(0.1, inplace=True),
    "elu": nn.ELU(inplace=True),
    "selu": nn.SELU(inplace=True),
    "celu": nn.CELU(inplace=True),
    "silu": nn.SiLU(inplace=True),
    "mish": nn.Mish(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "hardsigmoid": nn.Hardsigmoid(inplace=True),
    "threshold": nn.Threshold(0.1, 20.0, inplace=True),
    "random relu": nn.RReLU(inplace=True),
    "dropout": nn.Dropout(inplace=True),
    "square": Function(lambda x: x.pow_(2)),
    "power": Function(lambda x: x.abs_().add_(1).pow_(0.3)),
    "sigmoid": Function(lambda x: x.sigmoid_()),
    "several": Function(lambda x: x.mul_(0.1).add_(2).div_(3).abs_().tanh_()),
}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_the_plain_model_under_any_plan(norm, name):
    torch.manual_seed(0)
    blocks = [(nn.Conv2d(4, 4, 3, padding=1), norm(4), ACTIVATIONS[name]) for _ in range(2)]
    model = nn.Sequential(*(layer for block in blocks for layer in block), nn.Conv2d(4, 4, 3))
    graph = ogc.parse(model, X)
    for seed in range(6):
        rng = random.Random(seed)
        plan = ogc.make_plan(graph, random_tree(graph, rng), remade=random_values(graph, rng))
        assert_same_training(model, ogc.apply(model, graph, plan), (X,), steps=1)


class Branches(nn.Module):
    """Instance norms whose results are used again after an activation, before it, or returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

    def forward(self, x):
        first = self.norm(self.layers[0](x))
        x = nn.functional.relu_(first) + first
        second = self.norm(self.layers[1](x))
        part = second[:, :2].mul(2)
        x = nn.functional.silu(second, inplace=True) + part.sum()
        third = self.norm(self.layers[2](x))
        third.add_(x)
        return nn.functional.relu_(third), first


@pytest.mark.parametrize("seed", range(4))
def test_views_of_norms_that_others_use(seed):
    model, rng = Branches(), random.Random(seed)
    graph = ogc.parse(model, X)
    plan = ogc.make_plan(graph, random_tree(graph, rng), remade=random_values(graph, rng))
    assert_same_training(model, ogc.apply(model, graph, plan), (X,), steps=2)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
@pytest.mark.parametrize("profile", ["estimate", "measure"])
def test_activations_in_place_after_instance_norm_peak_as_simulated(profile, activation):
    """Written in place, the norm's result is a view, whose gradient autograd copies three times."""
    layers = [(nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16), activation(inplace=True)) for _ in range(4)]
    model = nn.Sequential(*(layer for block in layers for layer in block), nn.AdaptiveAvgPool2d(1))
    x = torch.randn(2, 16, 64, 64)
    optimised = ogc.optimize(model, x, profile=profile)
    plan = optimised.plan
    assert measured_peak(model, (x,)) == pytest.approx(plan.plain_peak_bytes, rel=0.01)
    assert measured_peak(optimised, (x,)) == pytest.approx(plan.peak_bytes, rel=0.01)


def write_through(x):
    part = x[:, 1:, 1:]
    part.mul_(part.detach().cos())
    return x, part


def write_twice(x):
    part = x[:, 1:, 1:].add_(1)
    part.mul_(2)
    return x, part


def add_to(x, weight):
    x[:, 1:, 1:] += weight
    return x


def put_into(x, weight):
    x[:, :, :8] = x[:, :, 8:16] + weight
    return x


def clamp(x, weight):
    with torch.no_grad():
        x[:, 1:, 1:].clamp_(-1, 1)
    return x * weight


WRITES = {
    "a sum": add_to,
    "a part of its own": put_into,
    "another's gradient": lambda x, weight: add_to(x, x.mean(2, keepdim=True)[:, 1:] * weight),
    "written twice": lambda x, weight: write_twice(x)[0] * weight,
    "the view read": lambda x, weight: write_twice(x)[1] * weight,
    "both read": lambda x, weight: (lambda whole, part: whole[:, 1:, 1:] + part * weight)(*write_through(x)),
    "without gradients": clamp,
    "shaped otherwise": lambda x, weight: x.view(8, -1).mul_(weight).view_as(x),
}


class Written(nn.Module):
    """Writes to a view of what a product makes: autograd copies the whole gradient, and the view's part of it."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.scale, self.weight = nn.Parameter(torch.ones(8)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for _ in range(2):
            x = (x * self.scale).tanh()
            x = self.write(x @ x.transpose(1, 2), self.weight).softmax(-1)[:, :, :8]
        return x.mean()


@pytest.mark.parametrize("profile", ["estimate", "measure"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_views_peak_as_simulated(name, profile):
    model, x = Written(WRITES[name]), torch.randn(8, 128, 8)
    optimised = ogc.optimize(model, x, profile=profile)
    assert measured_peak(model, (x,)) == pytest.approx(optimised.plan.plain_peak_bytes, rel=0.01)
    assert measured_peak(optimised, (x,)) == pytest.approx(optimised.plan.peak_bytes, rel=0.01)
    assert_same_training(model, optimised, (x,))


class Returned(nn.Module):
    """What was written through a view is returned, with the view."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return write_through(torch.tanh((x * self.scale) @ x.transpose(1, 2)) * 2)


def test_what_is_returned_has_its_gradient_after_the_write():
    model, x = Returned(), torch.randn(8, 128, 8)
    optimised = ogc.optimize(model, x)
    for run, predicted in ((model, optimised.plan.plain_peak_bytes), (optimised, optimised.plan.peak_bytes)):

        def step(run=run):
            results = run(x)
            ones = [torch.ones_like(result) for result in results]  # held here, not by autograd
            torch.autograd.backward(results, ones)
            return results

        held = sum(result.nbytes for result in step())
        assert peak_bytes(step, "cpu") - held == pytest.approx(predicted, rel=0.01)
    assert_same_training(model, optimised, (x,))

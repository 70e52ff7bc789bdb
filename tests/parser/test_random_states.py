"""Forwards that set torch's random state: the module that does is opaque, and the stream goes on as in plain."""

import copy

import pytest
import torch
from helpers import assert_same_training
from torch import nn

import ogc


def forks_and_seeds(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return x * torch.rand_like(x)


def forks(x):
    with torch.random.fork_rng(devices=[]):
        return nn.functional.dropout(x, 0.3)


def seeds(x):
    torch.random.manual_seed(7)
    return x * torch.rand_like(x)


def puts_back(x):
    state = torch.get_rng_state()
    x = x * torch.rand_like(x)
    torch.set_rng_state(state)
    return x


class Layer(nn.Module):
    def __init__(self, does=None):
        super().__init__()
        self.does, self.linear = does, nn.Linear(16, 16)

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        x = x if self.does is None else self.does(x)
        return nn.functional.dropout(x, 0.1).sin()


WAYS = (forks_and_seeds, forks, seeds, puts_back)


@pytest.mark.parametrize("does", WAYS)
def test_the_module_that_sets_it_is_an_opaque_module(does, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(does if n == 2 else None) for n in range(5)))
    x = torch.randn(32, 16)
    optimised = ogc.optimize(model, x, memory_budget="least")
    assert isinstance(optimised.plan, ogc.Plan)
    assert "2 (sets torch's random state (" in caplog.text
    assert_same_training(model, optimised, (x,))


@pytest.mark.full
@pytest.mark.parametrize("does", WAYS)
def test_the_model_itself_sets_it(does):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = copy.deepcopy(model)

        def forward(self, x):
            return does(self.layers(x))

    x = torch.randn(32, 16)
    around = Around()
    optimised = ogc.optimize(around, x, memory_budget="least")
    assert isinstance(optimised.plan, ogc.PartsPlan)
    assert_same_training(around, optimised, (x,))


class Swapped(nn.Module):
    """Has its weights only while it runs: hooks fetch them and take them away, as block swapping does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_forward_pre_hook(lambda module, args: module.move(torch.clone))
        self.register_forward_hook(lambda module, args, output: module.move(torch.clone))

    def move(self, how):
        for parameter in self.parameters():
            parameter.data = how(parameter.data)

    def forward(self, x):
        return torch.tanh(self.linear(x)).sin()


@pytest.mark.full
def test_blocks_that_hooks_swap(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(*(Swapped() if n % 2 else Layer() for n in range(5)))
    x = torch.randn(32, 16)
    optimised = ogc.optimize(model, x, memory_budget="least")
    assert "1 (has forward or backward hooks)" in caplog.text
    assert_same_training(model, optimised, (x,))

"""Functions that a forward makes while it runs: what they read of its variables is no state from before it."""

from functools import partial, reduce

import pytest
import torch
from helpers import assert_same_training
from torch import nn

import ogc


def in_a_loop(layers, x):
    for layer in layers:

        def run(h):
            return layer(h)  # noqa: B023

        x = x + run(x)
    return x


def as_a_lambda(layers, x):
    for layer in layers:
        x = x + (lambda h: layer(h))(x)
    return x


def as_a_comprehension(layers, x):
    branches = [x, 2 * x]
    for layer in layers:
        branches = [layer(branch) for branch in branches]
    return sum(branches)


def as_a_generator(layers, x):
    for number, layer in enumerate(layers):
        x = x + sum(layer(x) * number for number in range(1, number + 2))
    return x


def one_in_another(layers, x):
    for layer in layers:

        def outer(h):
            for factor in (1.0, 0.5):

                def inner(g):
                    return layer(g) * factor  # noqa: B023

                h = h + inner(h)
            return h

        x = outer(x)
    return x


def made_by_another(layers, x):
    def made(layer):
        return lambda h: h + layer(h)

    return reduce(lambda h, layer: made(layer)(h), layers, x)


def as_a_partial(layers, x):
    def run(layer, h, *, factor):
        return h + factor * layer(h)

    for number, layer in enumerate(layers):
        x = partial(run, layer, factor=1 / (1 + number))(x)
    return x


def that_counts(layers, x):
    count = 0

    def run(layer, h):
        nonlocal count
        count += 1
        return h + layer(h) / count

    for layer in layers:
        x = run(layer, x)
    return x


LOCAL = (
    in_a_loop, as_a_lambda, as_a_comprehension, as_a_generator, one_in_another, made_by_another, as_a_partial,
    that_counts,
)  # fmt: skip


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x):
        return self.run(self.layers, x)


@pytest.mark.full
@pytest.mark.parametrize("run", LOCAL)
def test_what_a_forward_makes_is_planned_as_a_whole(run):
    """Functions have been looked for before the forward begins, and are looked for while it runs."""
    x = torch.randn(256, 16)
    for _ in range(2):
        model = Net(run)
        optimised = ogc.optimize(model, x, memory_budget="least")
        assert isinstance(optimised.plan, ogc.Plan) and not optimised.plan.is_plain
    assert_same_training(model, optimised, (x,))
    assert_same_training(model, optimised, (torch.randn(200, 16),))


@pytest.mark.full
def test_what_was_made_around_the_forward_is_still_read():
    factor, x = 1.0, torch.randn(256, 16)

    def scaled(layers, x):
        def run(layer, h):
            return h + factor * layer(h)

        for layer in layers:
            x = run(layer, x)
        return x

    models = [Net(scaled) for _ in range(2)]
    optimised = [ogc.optimize(model, x, memory_budget="least") for model in models]
    for factor in (1.0, 0.5, 2.0):  # noqa: B007
        for model, run in zip(models, optimised, strict=True):
            assert_same_training(model, run, (x,), steps=1)


class Stores(nn.Module):
    """Keeps a function that its first forward made, and calls it in all."""

    def __init__(self):
        super().__init__()
        self.layers, self.stored = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), None
        self.box = [1.0]

    def forward(self, x):
        box = self.box

        def run(layer, h):
            return h + torch.tanh(layer(h)).square() * box[0]

        if self.stored is None:
            self.stored = run
        for layer in self.layers:
            x = self.stored(layer, x)
        return x


@pytest.mark.full
def test_what_an_earlier_forward_made_and_kept_is_read():
    model, x = Stores(), torch.randn(256, 16)
    model(x)
    first = model.box
    optimised = ogc.optimize(model, x, memory_budget="least")
    for value in (1.0, 3.0, 0.5):
        first[0] = value
        assert_same_training(model, optimised, (x,), steps=1)

"""Generators of random numbers and other objects written in C: planning leaves them as they are, calls use them."""

import itertools
import random
from array import array
from collections import UserDict, deque

import numpy as np
import pytest
import torch
from torch import nn

import ogc


class Net(nn.Module):
    """It scales its result by what it makes of something that it holds."""

    def __init__(self, held, used):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.held, self.used = held, used

    def forward(self, x):
        return self.layers(x) * self.used(self.held)


def shifted(held):
    held[0] += 1
    return float(held[0])


def rotated(held):
    held.rotate(1)
    return held[0]


def next_of(held):
    held["a"] += 1
    return held["a"]


class Counts:
    """An iterator written in Python."""

    def __init__(self):
        self.count = 0.0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        return self.count


HELD = {
    "Python's generator": (lambda: random.Random(0), lambda held: held.random()),
    "a branch on Python's generator": (lambda: random.Random(0), lambda held: 2.0 if held.random() < 0.5 else 1.0),
    "a choice of Python's generator": (lambda: random.Random(0), lambda held: held.choice([1.0, 1.0, 3.0])),
    "normal numbers, drawn in pairs": (lambda: random.Random(0), lambda held: held.gauss(1.0, 0.1)),
    "numpy's generator": (lambda: np.random.default_rng(0), lambda held: float(held.random())),
    "a branch on numpy's generator": (lambda: np.random.default_rng(0), lambda held: 1.0 + (held.random() < 0.5)),
    "numpy's old generator": (lambda: np.random.RandomState(0), lambda held: float(held.rand())),
    "a generator in a dict": (lambda: {"rng": random.Random(0)}, lambda held: held["rng"].random()),
    "bytes": (lambda: bytearray(b"\x01"), shifted),
    "an array": (lambda: array("d", [1.0]), shifted),
    "numpy's array": (lambda: np.array([1.0]), shifted),
    "a deque": (lambda: deque([1.0, 2.0, 3.0]), rotated),
    "a dict of Python's": (lambda: UserDict(a=1.0), next_of),
    "an iterator written in Python": (Counts, next),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", HELD)
def test_what_is_held_is_used_as_by_the_plain_model(kind):
    make, used = HELD[kind]
    plain, other = Net(make(), used), Net(make(), used)
    optimised = ogc.optimize(other, torch.randn(16, 8), profile="estimate", memory_budget="least")
    for _ in range(6):
        x = torch.randn(16, 8)
        results = [run(x) for run in (plain, optimised)]
        assert torch.equal(*results)
        grads = [
            torch.autograd.grad(result.square().sum(), list(model.parameters()))
            for result, model in zip(results, (plain, other), strict=True)
        ]
        assert all(map(torch.equal, *grads))
    assert optimised.report().planned  # the layers are


@pytest.mark.full
def test_a_generator_that_is_seeded_anew_gives_what_the_plain_model_gets():
    for make, reseed in (
        (lambda: random.Random(0), lambda model: model.held.seed(5)),
        (lambda: np.random.default_rng(0), lambda model: setattr(model, "held", np.random.default_rng(5))),
    ):
        plain, other = (Net(make(), lambda held: 2.0 if held.random() < 0.5 else 1.0) for _ in range(2))
        x = torch.randn(16, 8)
        optimised = ogc.optimize(other, x, profile="estimate", memory_budget="least")
        for _ in range(3):
            assert torch.equal(optimised(x), plain(x))
            reseed(plain)
            reseed(other)


def generator():
    yield from (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.cycle([1.0, 2.0]),
        itertools.count,
        generator,
        lambda: iter([1.0, 2.0]),
        lambda: map(abs, [1.0]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"opaque_modules": ["layers"]}, {"max_overhead": 0.2}])
def test_iterators_are_refused_before_they_are_used_up(make, options):
    model = Net(make(), next)
    before = dict(vars(model))
    with pytest.raises(ogc.InputError, match=r"reads the attribute held, an iterator \(\w+\).*hand what it gives in"):
        ogc.optimize(model, torch.randn(16, 8), profile="estimate", **options)
    assert vars(model) == before
    assert next(model.held) == next(make())


def test_iterators_in_submodules_and_in_what_they_hold_are_refused():
    model = nn.Sequential(Net(torch.tensor(1.0), float), Net({"a": [iter([1.0])]}, lambda held: next(held["a"][0])))
    with pytest.raises(ogc.InputError, match=r"reads the attribute 1\.held\[0\]\[0\], an iterator"):
        ogc.optimize(model, torch.randn(16, 8), profile="estimate", memory_budget="least")
    assert next(model[1].held["a"][0]) == 1.0


def test_iterators_that_the_forward_makes_are_its_own():
    model = Net([1.0, 2.0], lambda held: next(iter(held)) * next(itertools.count(2)))
    x = torch.randn(16, 8)
    assert torch.equal(ogc.optimize(model, x, profile="estimate", memory_budget="least")(x), model(x))

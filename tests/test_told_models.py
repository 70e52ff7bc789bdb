"""Models that are told what to keep, to recompute and to run once: bits, what runs again, and what is held."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import trace_of_training
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ogc


class Sine(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)


class Bend(torch.nn.Module):
    def forward(self, x):
        return torch.atan(x)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width)
        self.act, self.down, self.drop = Sine(), torch.nn.Linear(2 * width, width), torch.nn.Dropout(0.1)
        self.bend = Bend()

    def forward(self, x):
        return x + self.bend(self.drop(self.down(self.act(self.up(self.norm(x))))))


class Net(torch.nn.Module):
    def __init__(self, layers=4, width=64):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Watched(TorchDispatchMode):
    """Counts calls of operators, and knows the memory that each gave."""

    only_looks = True

    def __init__(self):
        super().__init__()
        self.counts, self.given = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if isinstance(result, torch.Tensor):
            self.given.setdefault(name, []).append(StorageWeakRef(result.untyped_storage()))
        return result


def watched_step(model, x):
    """Calls of each operator in the backward of one step, and how many of its results the forward left."""
    with Watched() as forward:
        loss = model(x).square().sum()
    gc.collect()
    held = {name: sum(not one.expired() for one in refs) for name, refs in forward.given.items()}
    with Watched() as backward:
        loss.backward()
    return backward.counts, held


def net():
    torch.manual_seed(0)
    return Net(), torch.randn(64, 64)


def assert_same(model, run, x):
    plain = trace_of_training(model, model, (x,))
    assert all(map(torch.equal, plain, trace_of_training(model, run, (x,))))


GOALS = [{}, {"memory_budget": "least"}, {"memory_budget": 0.7}, {"max_overhead": 1.0}]


@pytest.mark.parametrize("goal", GOALS)
def test_a_model_runs_as_it_is_told(goal):
    model, x = net()
    graph = ogc.parse(model, x, profile="estimate")
    run = ogc.apply(model, graph, ogc.solve(graph, **goal, recompute=[Block], keep=[Bend], once=["layers.0.up"]))
    again, held = watched_step(run, x)
    # The last block's backward comes first, and its memory is what the allocator gives next.
    assert "atan" not in again and again["sin"] >= 4 and again["addmm"] >= 3 and not held["sin"]
    assert_same(model, run, x)


def test_what_it_is_not_told_is_free():
    model, x = net()
    graph = ogc.parse(model, x, profile="estimate")
    again, held = watched_step(ogc.apply(model, graph, ogc.solve(graph, keep=["*.act"], memory_budget="least")), x)
    assert "sin" not in again and held["sin"] == 4 and again["atan"] >= 1
    again, held = watched_step(ogc.apply(model, graph, ogc.solve(graph, memory_budget="least")), x)
    assert again["sin"] >= 1 and held["sin"] < 4
    plain, held = watched_step(model, x)
    assert "sin" not in plain and held["sin"] == 4

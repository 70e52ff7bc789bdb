"""What is left out is left out, and other orders of a program are the same program."""

import torch
from torch import nn

import ogc
from benchmarks.ablation import in_another_order, without


class Branches(nn.Module):
    """Three ways from one tensor to a sum: one writes in place, two draw random numbers, one is a view."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = x.tanh()
        a = nn.functional.dropout(self.first(x).relu_(), 0.5)
        b = nn.functional.dropout(self.second(x), 0.5).t()
        c = self.third(x)
        c += b.sum()
        return a * b.t() + c


def test_it_computes_the_same_with_the_same_random_numbers():
    model, x = Branches(), torch.randn(4, 8)
    graph = ogc.parse(model, x)
    others = [other for seed in range(20) if (other := in_another_order(model, graph, seed)) is not None]
    assert len({str(other.graph) for other in others}) > 3
    for other in others:
        torch.manual_seed(3)
        expected = model(x)
        torch.manual_seed(3)
        (found,) = other(x)
        assert torch.equal(found, expected)


def test_a_chain_has_no_other_order():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert in_another_order(model, ogc.parse(model, torch.randn(4, 8)), 0) is None


def test_each_part_is_left_out():
    block = (nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 32), nn.LayerNorm(32))
    model = nn.Sequential(*(layer for _ in range(12) for layer in block))
    graph = ogc.parse(model, torch.randn(2048, 32), profile="estimate")
    plans = {}
    for name, context in without():
        with context:
            plans[name] = [ogc.solve(graph, **wish) for wish in ({}, {"max_overhead": 0.15})]
    least, quick = plans["nothing"]
    assert plans["nested plans"][0].peak_bytes > 1.2 * least.peak_bytes
    assert quick.decisions.kept and not plans["kept values"][1].decisions.kept
    assert plans["kept values"][1].peak_bytes > 1.2 * quick.peak_bytes
    assert not any(plan.remade for plan in plans["remade values"])

"""Long programs: a hundred thousand operations from a real module, planned and run."""

import resource
import time

import pytest
import torch
from torch import nn

import ogc


class Tiny(nn.Module):
    """Many calls of a function of a hundred small multiplications."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.weight = nn.Parameter(torch.full((100,), 1.0001))

    def forward(self, x):
        for _ in range(self.calls):
            x = self.hundred(x)
        return x

    def hundred(self, x):
        for _ in range(100):
            x = x * self.weight
        return x


@pytest.mark.parametrize("calls", [5, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_long_chain(calls):
    model, x = Tiny(calls), torch.randn(100)
    graph = ogc.parse(model, x)
    assert len(graph) == 100 * calls
    start = time.perf_counter()
    plan = ogc.solve(graph)
    seconds = time.perf_counter() - start
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{len(graph)} operations: {seconds:.1f} s, {gigabytes:.2f} GB, {plan.peak_bytes / plan.plain_peak_bytes:.2%}"
    )
    assert seconds <= 60
    assert plan.peak_bytes < plan.plain_peak_bytes / 10
    if calls == 1000:
        assert gigabytes <= 4
    gradients = []
    for run in (model, ogc.apply(model, graph, plan)):
        model.weight.grad = None
        run(x).sum().backward()
        gradients.append(model.weight.grad)
    assert torch.equal(*gradients)

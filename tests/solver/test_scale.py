"""Long programs: a hundred thousand operations from a real module, planned and run."""

import random
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
@pytest.mark.full
def test_a_long_chain(calls):
    model, x = Tiny(calls), torch.randn(100)
    graph = ogc.parse(model, x)
    assert len(graph) == 100 * calls
    start = time.perf_counter()
    plan = ogc.solve(graph, memory_budget="least")
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


def random_dag(count, seed=0):
    """Operations that read the last few values, and now and then one from any time before."""
    rng = random.Random(seed)
    operations = []
    for t in range(count):
        near = {rng.randrange(max(0, t - 6), t) for _ in range(rng.choice([1, 1, 2, 3]))} if t else set()
        reads = near | ({rng.randrange(t)} if t and rng.random() < 0.01 else set())
        saves = [v for v in (*reads, t) if rng.random() < 0.5]
        seconds = {"forward_seconds": rng.choice([0.5, 1.0, 2.0, 5.0]), "backward_seconds": 2.0}
        operations.append(
            ogc.Operation(f"op{t}", reads=tuple(sorted(reads)), writes=(t,), saves=tuple(sorted(saves)), **seconds)
        )
    values = [ogc.Value(f"v{t}", rng.choice([1, 2, 3, 5, 8, 13, 100]), t == count - 1) for t in range(count)]
    return ogc.Graph(tuple(operations), tuple(values))


@pytest.mark.slow
def test_a_random_dag_of_two_thousand_operations():
    graph = random_dag(2000)
    start = time.perf_counter()
    plan = ogc.solve(graph, memory_budget="least")
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    within = ogc.solve(graph, memory_budget=(plan.peak_bytes + plan.plain_peak_bytes) // 2)
    print(
        f"\n{len(graph)} operations, {len(graph.cuts)} cuts: {seconds:.1f} s for {plan.peak_bytes} of "
        f"{plan.plain_peak_bytes} bytes, {time.perf_counter() - start:.1f} s for half way at {within.overhead:.1%}"
    )
    assert seconds <= 20
    assert plan.peak_bytes < plan.plain_peak_bytes / 2
    assert within.overhead < plan.overhead

"""Planned graphs that Inductor compiles: equal up to rounding, at the peak that was planned."""

import copy
import pickle
import shutil

import pytest
import torch
from helpers import random_graph
from test_backend import attention, made, residual, tied

import ogc
from ogc.compiling.backend import Settings, _Group, _OneOfMany
from ogc.solver import frontier
from ogc.torch_state.allocator import peak_bytes

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]


def peak_and_gradients(run, model, x):
    def step():
        torch.manual_seed(3)
        result = run(x)
        # its backward makes nothing but the gradient of the result
        (result[0] if isinstance(result, tuple) else result).mean().backward()

    step()
    model.zero_grad(set_to_none=True)
    step()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return peak_bytes(step, "cpu"), gradients


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    """So that each compilation plans."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("make", [attention, tied, residual])
@pytest.mark.usefixtures("no_cache")
def test_compiled_plans_keep_their_peaks(make):
    model, x = made(make)
    torch._dynamo.reset()
    peaks, plain = [], peak_and_gradients(torch.compile(model), model, x)
    for budget in (0.7, "least"):
        torch._dynamo.reset()
        partitioner = ogc.Partitioner(memory_budget=budget)
        peak, gradients = peak_and_gradients(torch.compile(model, options=partitioner.options), model, x)
        (plan,) = partitioner.plans
        assert 0.95 * plan.peak_bytes < peak < 1.005 * plan.peak_bytes
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients, plain[1], strict=True))
        peaks.append(peak)
    assert peaks[1] < peaks[0] < plain[0]


def test_caches_know_partitioners_apart():
    ids = {ogc.Partitioner(memory_budget=budget).uuid() for budget in (0.5, 0.6, "least", None)}
    assert len({*ids, ogc.Partitioner(max_overhead=0.5).uuid(), ogc.Partitioner(fuses=False).uuid()}) == 6
    assert ogc.Partitioner(memory_budget=0.5).uuid() in ids


def test_caches_know_nothing_of_what_shares_a_budget_before_plans_are_chosen():
    """The others' graphs decide too, and what a cache returns has none."""
    group = _Group({}, Settings({"memory_budget": 1000, "inductor": True}))
    first, second = _OneOfMany(group), _OneOfMany(group)
    assert first.uuid() != second.uuid()
    ids = {first.uuid(), second.uuid()}
    plans = frontier(random_graph(3, 8)).plans
    for plan in plans:
        first.chosen = second.chosen = plan
        assert first.uuid() == second.uuid()
        ids.add(first.uuid())
    assert len(ids) == len(plans) + 2 > 3


def test_caches_pickle_no_plans():
    partitioner = ogc.Partitioner(memory_budget=0.5)
    known = pickle.dumps(partitioner)
    partitioner.plans.append(frontier(random_graph(0, 6)).plans[0])
    assert pickle.dumps(partitioner) == known != pickle.dumps(ogc.Partitioner(memory_budget=0.6))
    assert pickle.loads(known).uuid() == partitioner.uuid()
    assert copy.deepcopy({"custom_partitioner_fn": partitioner})["custom_partitioner_fn"] is partitioner

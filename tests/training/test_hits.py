"""Detectors, segmenters, trackers and graph networks, trained on data with other numbers of hits than the sample's.

Whatever the number is, each step is the plain model's: outputs, gradients, buffers, random numbers, or the same error.
"""

import copy

import pytest
import torch
from helpers import tensors_of
from hits import HEADS, ROWS, WIDTH, Net, known

import ogc

pytestmark = pytest.mark.full

SAMPLE = 5, 0
"""How many hits there are in the sample, and the seed of it."""
OTHERS = [SAMPLE, (2, 1), (0, 2), (5, 3), (17, 4), SAMPLE]


def trace(model, optimizer, given):
    """All that a step leaves, or the error that it ends in."""
    torch.manual_seed(1)
    optimizer.zero_grad()
    given = copy.deepcopy(given)
    try:
        result = model(**given) if isinstance(given, dict) else model(*given)
        outputs = tensors_of(result.to_tuple() if hasattr(result, "to_tuple") else result)
        named = isinstance(given, dict) and not isinstance(result, torch.Tensor)
        loss = result["loss"] if named else sum(tensor.sum() for tensor in outputs if tensor.requires_grad)
        loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
        optimizer.step()
    grads = [p if p.grad is None else p.grad.clone() for p in model.parameters()]
    states = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    return [*(tensor.detach() for tensor in outputs), *grads, *states, torch.get_rng_state()]


def assert_alike(ours, plain):
    if isinstance(ours, str) or isinstance(plain, str):
        assert ours == plain
        return
    assert len(ours) == len(plain)
    for number, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()), f"tensor {number} of {len(plain)}"


def train_beside_plain(model, given, others):
    """The optimized model, after steps that are the plain model's."""
    optimised = ogc.optimize(copy.deepcopy(model), given(*SAMPLE), memory_budget="least")
    runs = [(one, torch.optim.SGD(one.parameters(), 0.01)) for one in (model, optimised)]
    errors = 0
    for hits, seed in others:
        plain, ours = (trace(*run, given(hits, seed)) for run in runs)
        assert_alike(ours, plain)
        errors += isinstance(plain, str)
    assert errors < len(others) - 2
    return optimised


def rows(hits, seed):
    """For the networks in ``hits.py``."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "known": known(hits, seed)}


LONG = {"suppression of given boxes", "split by frames"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in HEADS])
def test_of_rows(name):
    optimised = train_beside_plain(Net(HEADS[name]), rows, OTHERS)
    assert isinstance(optimised.plan, ogc.PartsPlan) or not optimised.plan.is_plain
    assert optimised.report().planned > 0

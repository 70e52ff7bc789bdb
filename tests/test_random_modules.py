"""Random modules: whatever the plan, training is bitwise the plain model's, or a clear error says why not."""

from __future__ import annotations

import copy
import logging
import random
from collections import Counter

import pytest
import torch
from helpers import loss_of, random_plans, tensors_of
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from random_modules import Program, programs

import ogc


@pytest.fixture(autouse=True)
def quiet():
    """Thousands of warnings, of opaque modules and of models too small to save in, would hide a failure's text."""
    logger = logging.getLogger("ogc")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, or both are no number in the same places."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.contiguous(), b.contiguous()
    return bool(((a.view(whole) == b.view(whole)) | (a.isnan() & b.isnan())).all())


def training(model: torch.nn.Module, run: torch.nn.Module, inputs: tuple, steps: int = 2) -> dict[str, object]:
    """What is seen over a few steps of ``run``, by name; ``model``, which owns the parameters, is put back."""
    start = copy.deepcopy(model.state_dict())
    seen: dict[str, object] = {}
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        given = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        result = run(*given)
        outputs = tensors_of(result)
        loss = loss_of(result)
        if loss.requires_grad:
            loss.backward()
        seen[f"step {step}: structure"] = torch.utils._pytree.tree_structure(result)
        named = {f"output {n}": t.detach().clone() for n, t in enumerate(outputs)}
        named |= {f"gradient of {name}": copy.copy(p.grad) for name, p in model.named_parameters()}
        named |= {f"gradient of input {n}": x.grad for n, x in enumerate(given) if x.is_leaf}
        named |= {f"input {n} afterwards": x.detach() for n, x in enumerate(given)}
        optimizer.step()
        named |= {f"{name} afterwards": tensor.clone() for name, tensor in model.state_dict().items()}
        named["random state"] = torch.get_rng_state()
        seen |= {f"step {step}: {name}": thing for name, thing in named.items()}
    model.load_state_dict(start)
    model.zero_grad()
    return seen


def assert_same(ours: dict[str, object], plain: dict[str, object]) -> None:
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        found = ours[name]
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
            assert same(found, expected), f"{name}: {found} instead of {expected}"
        else:
            assert found == expected, f"{name}: {found} instead of {expected}"


def assert_faithful(program: Program, share: float, seed: int) -> None:
    """Every kind of plan trains as the plain model does."""
    model, inputs = program.make()
    plain = training(model, model, inputs)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimised = ogc.optimize(model, inputs, profile="estimate", memory_budget="least")
    assert all(same(tensor, before[name]) for name, tensor in model.state_dict().items())
    graph, least = optimised.graph, optimised.plan
    assert least.peak_bytes <= least.plain_peak_bytes
    assert_same(training(model, optimised, inputs), plain)
    budget = least.peak_bytes + int(share * (least.plain_peak_bytes - least.peak_bytes))
    rng = random.Random(seed)
    plans = [ogc.solve(graph, memory_budget=max(1, budget)), ogc.solve(graph, max_overhead=share / 2)]
    if len(graph):
        plans += random_plans(graph, rng, 1)
    for plan in plans:
        assert_same(training(model, ogc.apply(model, graph, plan), inputs), plain)


def faithful(examples: int, derandomize: bool = True) -> Counter[str]:
    """Try so many programs; what became of them."""
    outcome: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs, st.floats(0, 1), st.integers(0, 99))
    def trial(program: Program, share: float, seed: int) -> None:
        try:
            assert_faithful(program, share, seed)
        except (ogc.InputError, ogc.ParseError) as error:
            outcome[type(error).__name__] += 1
            event(str(error)[:80])
        else:
            outcome["faithful"] += 1

    trial()
    return outcome


@pytest.mark.full
def test_random_modules():
    outcome = faithful(30)
    assert outcome["faithful"] > 0.9 * outcome.total(), outcome


@pytest.mark.slow
def test_many_random_modules():
    outcome = faithful(1000)
    assert outcome["faithful"] > 0.9 * outcome.total(), outcome

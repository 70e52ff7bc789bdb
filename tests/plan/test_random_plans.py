"""Plans that no search need ever find, drawn by its moves: each is run, with the plain model's bits and the peak that
it promises, at least."""

from random import Random

import models
import pytest
import torch
from helpers import loss_of, measured_peak, random_decisions, random_plans, trace_of_training
from test_memory import AddsInPlace, Custom, Ghost, InOneMatrix, KeepsAside, KeepsResultAside, TwoStreams
from torch import nn

import ogc
from ogc.errors import PlanError
from ogc.plan.fast import Replay
from ogc.solver.candidates import weigh
from ogc.solver.polish import _Moves

SCALARS = 600
"""Bytes of losses and the like that may be missing."""

EARLY = 2
"""Of the largest tensors, so many may be gone before the end of a backward whose saved tensors a recomputation made:
its kernels let go of these one by one, and sums over what was broadcast come last."""

EXACT = 0.8
"""At least this share of plans takes to the byte what it promises, but with modules of several kernels."""

MOVES = 30


class Autocast(nn.Module):
    """Part of a network in another type."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.body(x)


class Branch(nn.Module):
    """An opaque module that saves its own result, and may be called again."""

    def forward(self, x):
        return x.tanh().exp() if x.sum() > -1e9 else x


def stack(block, count, width=64):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), block()) for _ in range(count)))


CASES = {
    "residual": (models.Residual, lambda: torch.randn(16, 3, 8, 8)),
    "attention": (models.Attention, lambda: torch.randint(11, (8, 64))),
    "ghost": (lambda: nn.Sequential(*(Ghost() for _ in range(4))), lambda: torch.randn(256, 64)),
    "opaque": (lambda: stack(Branch, 4), lambda: torch.randn(256, 64)),
    "kept aside": (lambda: nn.Sequential(*(Custom(KeepsAside) for _ in range(4))), lambda: torch.randn(256, 64)),
}
MORE = {
    "out of place": (lambda: models.Residual(inplace=False), lambda: torch.randn(16, 3, 8, 8)),
    "dense": (models.Dense, lambda: torch.randn(16, 3, 8, 8)),
    "shared": (models.Shared, lambda: torch.randn(512, 6)),
    "frozen": (models.Frozen, lambda: torch.randn(8, 3, 16, 16)),
    "without grad": (models.WithoutGrad, lambda: torch.randn(8, 3, 16, 16)),
    "written out": (lambda: nn.Sequential(*(models.SelfAttention() for _ in range(4))), lambda: torch.randn(8, 64, 16)),
    "one matrix": (lambda: nn.Sequential(InOneMatrix(), nn.Tanh(), InOneMatrix()), lambda: torch.randn(128, 64)),
    "two streams": (TwoStreams, lambda: torch.randn(64, 64)),
    "in place": (lambda: nn.Sequential(AddsInPlace(), AddsInPlace()), lambda: torch.randn(2, 48, 64)),
    "result aside": (
        lambda: nn.Sequential(*(Custom(KeepsResultAside) for _ in range(4))),
        lambda: torch.randn(256, 64),
    ),
    "random": (
        lambda: stack(lambda: nn.Sequential(nn.RReLU(), nn.Dropout(0.2), nn.LayerNorm(64), nn.SiLU(inplace=True)), 4),
        lambda: torch.randn(128, 64),
    ),
    "autocast": (Autocast, lambda: torch.randn(4, 3, 32, 32)),
}


def moved(graph, start, seed):
    """The plan that so many moves from another one make, whatever they cost."""
    costs, moving = Replay(graph), _Moves(graph, Random(seed), nested=True)
    now = weigh(costs, start.decisions)
    for _ in range(MOVES):
        decisions = moving.moved(now)
        try:
            now = now if decisions is None else weigh(costs, decisions)
        except PlanError:  # an operation would run twice that must not
            continue
    return ogc.make_plan(graph, now.decisions)


def exact_runs(model, inputs, graph, plans):
    """How many of the plans peak as promised; all have the plain model's bits, and none peaks higher, or much lower."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = trace_of_training(model, model, inputs, 1)
    most, exact = EARLY * max(value.bytes for value in graph.values), 0
    for plan in plans:
        run = ogc.apply(model, graph, plan)
        spare = plan.peak_bytes - measured_peak(run, inputs)
        exact += abs(spare) <= SCALARS
        assert -SCALARS <= spare <= most, plan.decisions
        model.load_state_dict(state)
        found = trace_of_training(model, run, inputs, 1)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), plan.decisions
    return exact


def assert_kept(name, seeds):
    """Plans by moves and at random have the plain model's bits, and the peak that they promise."""
    torch.manual_seed(0)
    make, make_inputs = (CASES | MORE)[name]
    model, inputs = make(), (make_inputs(),)
    graph = ogc.parse(model, inputs, loss=loss_of, holds_outputs=False, profile="estimate")
    plain = ogc.solve(graph, solver="none")
    assert abs(plain.peak_bytes - measured_peak(model, inputs)) <= SCALARS
    start = ogc.solve(graph, memory_budget="least")
    plans = [start, *(moved(graph, start, seed) for seed in seeds)]
    plans += random_plans(graph, Random(0), len(seeds), random_decisions)
    exact = exact_runs(model, inputs, graph, plans)
    assert name == "opaque" or exact >= EXACT * len(plans)


@pytest.mark.parametrize("name", CASES)
def test_plans_by_moves_keep_bits_and_promises(name):
    assert_kept(name, range(2))


@pytest.mark.full
@pytest.mark.parametrize("name", {**CASES, **MORE})
def test_many_plans_by_moves_keep_bits_and_promises(name):
    assert_kept(name, range(10, 22))

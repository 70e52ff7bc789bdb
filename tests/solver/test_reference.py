"""Solvers to compare with: known answers, and plans that run."""

import random
from functools import cache
from itertools import pairwise
from math import comb

import pytest
import torch
from helpers import assert_same_training, chain, random_graph
from models import CASES, Residual, images
from torch import nn

import ogc
from ogc.errors import InputError
from ogc.graph import Graph
from ogc.plan import simulate
from ogc.plan.decisions import saved
from ogc.solver import LEAST_PEAK, SOLVERS
from ogc.solver.references import REFERENCES, all_but_last, chen, revolve, uniform


def edges(segments):
    return [0, *(segment.stop for segment in segments)]


@pytest.mark.parametrize("root", [2, 4, 10, 25])
def test_chen_cuts_a_uniform_chain_into_sqrt_n(root):
    segments = chen(chain([1] * root**2), LEAST_PEAK).segments
    assert edges(segments) == list(range(0, root**2 + 1, root))
    assert [segment.depth for segment in segments] == [1] * (root - 1) + [0]
    # While the first segment is run backward its values are there, and the output.
    assert simulate(chain([1] * root**2), segments).peak_bytes <= 2 * root + 1


def test_chen_weighs_segments_by_bytes():
    # A budget of half of all 16 bytes is passed by the second value: 1 byte is kept, 9 are in the larger segment.
    assert edges(chen(chain([8, *[1] * 8]), LEAST_PEAK).segments) == [0, 2, 9]


@pytest.mark.parametrize("length", [2, 12, 37])
def test_uniform_is_the_best_of_equal_segments(length):
    graph = chain([1] * length)
    peaks = []
    for count in range(1, length + 1):
        cuts = sorted({round(length * k / count) for k in range(count + 1)})
        peaks.append(simulate(graph, all_but_last(cuts)).peak_bytes)
    plan = uniform(graph, LEAST_PEAK)
    assert simulate(graph, plan).peak_bytes == plan.peak_bytes == min(peaks)
    spans = [b - a for a, b in pairwise(edges(plan.segments))]
    assert max(spans) - min(spans) <= 1


@cache
def fewest_steps(length, snapshots):
    """Steps run again to reverse a chain, by trying every place for the next snapshot."""
    if length == 1:
        return 0
    if snapshots == 0:
        return float("inf")
    return min(m + fewest_steps(m, snapshots) + fewest_steps(length - m, snapshots - 1) for m in range(1, length))


def steps_again(segments):
    return sum(s.stop - s.start + steps_again(s.parts) for s in segments if s.parts)


def snapshots_at_once(segments):
    """Most starts of segments kept at once; a saved one behind others goes on from where they ended."""
    return max(1, *(n + (snapshots_at_once(s.parts) if s.parts else 0) for n, s in enumerate(segments)))


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("length", [1, 2, 3, 10, 21, 40])
def test_binomial_runs_as_few_steps_again_as_can_be(length, snapshots):
    segments = revolve(range(length + 1), snapshots)
    r = next(r for r in range(length) if comb(snapshots + r, snapshots) >= length)
    closed_form = r * length - comb(snapshots + r, snapshots + 1)
    assert steps_again(segments) == fewest_steps(length, snapshots) == closed_form
    assert snapshots_at_once(segments) <= snapshots
    assert max(segment.depth for segment in segments) <= r


def test_binomial_needs_little_on_a_long_chain():
    plan = ogc.solve(chain([1] * 400), solver="binomial")
    assert plan.peak_bytes < 25
    assert max(segment.depth for segment in plan.segments) > 2


@pytest.mark.full
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(25))
def test_every_solver_plans_every_graph_and_always_the_same(seed, solver):
    graph = random_graph(seed, most=30)
    plan = ogc.solve(graph, solver=solver)
    assert plan == ogc.solve(graph, solver=solver)
    assert plan.solver == solver or plan.is_plain


@pytest.mark.parametrize("seed", range(10))
def test_on_chains_none_needs_less_than_ours(seed):
    rng = random.Random(seed)
    graph = chain([rng.randrange(1, 9) for _ in range(40)], backward_bytes=seed)
    peaks = {solver: ogc.solve(graph, solver=solver).peak_bytes for solver in SOLVERS}
    peaks["optimal"] = ogc.solve(graph, memory_budget="least").peak_bytes
    assert min(peaks, key=peaks.__getitem__) == "optimal"


@pytest.mark.full
@pytest.mark.parametrize("length", [50, 100, 200, 300, 600, 1400])
def test_on_long_chains_the_binomial_schedule_is_neither_smaller_nor_faster(length):
    graph = chain([1] * length)
    least, binomial = ogc.solve(graph, memory_budget="least"), ogc.solve(graph, solver="binomial")
    assert least.peak_bytes <= binomial.peak_bytes
    same = ogc.solve(graph, memory_budget=binomial.peak_bytes)
    assert same.recomputed_seconds < binomial.recomputed_seconds


@pytest.mark.full
def test_a_plan_nested_as_deep_as_plans_are_trains_the_same():
    torch.manual_seed(0)
    layers = [layer for _ in range(50) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model, x = nn.Sequential(*layers), torch.randn(512, 64)
    graph = ogc.parse(model, x)
    plan = ogc.solve(graph, memory_budget="least")
    assert plan.peak_bytes <= ogc.solve(graph, solver="binomial").peak_bytes
    assert max(segment.depth for segment in plan.segments) >= 8
    assert_same_training(model, ogc.apply(model, graph, plan), (x,), steps=1)


@pytest.mark.full
@pytest.mark.parametrize("solver", REFERENCES)
@pytest.mark.parametrize("name", CASES)
def test_training_by_any_solver_is_bitwise_the_plain_models(name, solver):
    make, inputs = CASES[name]
    model, given = make(), inputs()
    assert_same_training(model, ogc.optimize(model, given, solver=solver), given, steps=2)


def test_none_is_the_plain_model(caplog):
    optimised = ogc.optimize(Residual(), images(), solver="none")
    assert optimised.plan.is_plain
    assert optimised.plan.segments == (saved(0, len(optimised.graph)),)
    assert not caplog.records, "it is what was asked for"


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_graph_without_operations(solver):
    assert ogc.solve(Graph((), ()), solver=solver).is_plain


def test_an_unknown_solver_is_refused_with_those_there_are():
    with pytest.raises(InputError, match="'uniform', 'binomial', 'feng-huang', not 'chem'"):
        ogc.solve(chain([1]), solver="chem")
    with pytest.raises(InputError, match="not None"):
        ogc.optimize(torch.nn.Linear(2, 2), torch.randn(2, 2), solver=None)


@pytest.mark.parametrize("goal", [{"memory_budget": 0.5}, {"max_overhead": 0.1}])
@pytest.mark.parametrize("solver", ["none", "feng-huang"])
def test_a_goal_with_another_solver_than_ours_is_refused(solver, goal):
    with pytest.raises(InputError, match=f"'{solver}' takes neither memory_budget nor max_overhead"):
        ogc.solve(chain([1] * 4), solver=solver, **goal)

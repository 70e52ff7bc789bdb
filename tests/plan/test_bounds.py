"""Bounds of all plans: below random plans, planned ones and exact optima; what is proven of a plan, in words."""

import math
import pickle
import random
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers import chain, random_decisions, random_graph, random_plans, run_apart, seeds

import ogc
from ogc.errors import DependencyError, PlanError
from ogc.graph import RuntimeCosts, Variant
from ogc.plan import lower_bound, plain_plan
from ogc.plan.bounds import Bounds, Gap


def variants_graph(seed, most):
    """A random graph of which some operations have a low-memory variant that saves and takes otherwise."""
    graph, rng = random_graph(seed, most), random.Random(seed)

    def with_variant(op):
        if not op.replayable or rng.random() < 0.5:
            return op
        names = [name for name in vars(Variant(saves=())) if name.endswith(("_bytes", "_seconds"))]
        weights = {name: getattr(op, name) for name in names}
        weights["internal_bytes"], weights["backward_bytes"] = rng.choice([0, 2, 9]), rng.randrange(60)
        weights["again_seconds"] = rng.choice([0.0, 0.5])
        saves = tuple(v for v in op.saves if rng.random() < 0.7)
        return replace(op, low_memory=Variant(saves=saves, **weights))

    costs = RuntimeCosts(run=0.1, saved_tensor=0.01, choice=0.02) if rng.random() < 0.5 else RuntimeCosts()
    return replace(graph, operations=tuple(map(with_variant, graph.operations)), runtime=costs)


def check_no_plan_is_better(graph, plans):
    bounds = Bounds(graph, plans[0].decisions)
    for plan in plans:
        assert bounds.least_bytes(plan.added_seconds) <= plan.peak_bytes
        assert bounds.least_seconds(plan.peak_bytes) <= plan.added_seconds * (1 + 1e-9) + 1e-9
    for seconds in (0.5, 2.0, 8.0):
        least = min((plan.peak_bytes for plan in plans if plan.added_seconds <= seconds), default=math.inf)
        assert bounds.least_bytes(seconds) <= least


def check_random_plans(seed, count, goals=()):
    for graph in (random_graph(seed, most=14), variants_graph(seed, most=14)):
        rng = random.Random(seed)
        plans = [*random_plans(graph, rng, count), *random_plans(graph, rng, count, random_decisions)]
        planned = [ogc.solve(replace(graph), effort=1, **goal) for goal in goals]
        check_no_plan_is_better(graph, [*plans, *planned, plain_plan(graph)])


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_no_plan_is_better_than_the_bounds(seed):
    check_random_plans(seed, count=3)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8, 200))
def test_no_plan_of_more_graphs_is_better_than_the_bounds(seed):
    check_random_plans(seed, count=6, goals=[{"memory_budget": "least"}, {"max_overhead": 0.2}, {}])


@pytest.mark.parametrize("seed", range(8))
def test_less_is_allowed_less_is_possible(seed):
    graph = variants_graph(seed, most=12)
    bounds, plain, least = Bounds(graph), plain_plan(graph).peak_bytes, lower_bound(graph)
    by_time = [bounds.least_bytes(seconds) for seconds in (math.inf, 20.0, 5.0, 1.0, 0.1)]
    assert by_time == sorted(by_time) and least <= by_time[0] and by_time[-1] <= max(plain, least)
    by_bytes = [bounds.least_seconds(plain + (least - plain) * n // 5) for n in range(6)]
    assert all(a <= b + 1e-3 * graph.step_seconds for a, b in pairwise(by_bytes))
    assert bounds.least_seconds(least - 1) == math.inf


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_variants_do_not_change_cuts(seed):
    """So no plan of one choice of variants is refused in another."""
    graph = variants_graph(seed, most=14)
    assert {graph.with_variants(chosen).cuts for chosen in ((), graph.low_memory, graph.low_memory[:1])} == {graph.cuts}
    for goal in ({"memory_budget": "least"}, {"max_overhead": 0.2}, {}):
        ogc.simulate(graph, ogc.solve(graph, **goal))


def test_bounds_by_hand():
    """Of four equal operations, the first may be recomputed or the last two values held."""
    graph = chain([10, 10, 10, 10, 1])
    bounds, plain = Bounds(graph), plain_plan(graph).peak_bytes
    assert plain == 41
    assert bounds.least_seconds(41) == 0
    assert bounds.least_seconds(31) == pytest.approx(1.0, abs=1e-3)  # one of the values is recomputed
    assert bounds.least_seconds(26) == pytest.approx(1.5, abs=1e-3)  # or, by the relaxation, one and a half
    assert bounds.least_bytes(0.0) == 41 and bounds.least_bytes(1.0) in (30, 31)
    assert Bounds(ogc.Graph((), ())).least_bytes() == 0


def test_a_plan_that_meets_its_bounds_is_optimal():
    graph = chain([10, 10, 10, 10, 1])
    plan = ogc.solve(graph, memory_budget=31)
    assert (plan.gap.bytes, plan.gap.time, plan.gap.overhead) == (0.0, pytest.approx(0, abs=1e-3), 0.0), plan.gap


def test_the_gap_is_by_what_was_asked_for():
    graph = chain([9, 4, 7, 7, 3, 8, 8, 5, 5, 6])
    plan = ogc.solve(graph, max_overhead=0.2)
    bounds = Bounds(graph, plan.decisions)
    assert plan.gap.least_bytes == bounds.least_bytes(0.2 * graph.step_seconds)
    assert replace(plan, max_overhead=None).gap.least_bytes == bounds.least_bytes(plan.added_seconds)
    budget = plan_of_bytes(graph, 0.7)
    assert budget.gap.least_seconds == Bounds(graph, budget.decisions).least_seconds(budget.budget_bytes)


def plan_of_bytes(graph, share):
    return ogc.solve(graph, memory_budget=share)


def test_a_printed_plan_has_the_gap_once_it_is_known():
    plan = plan_of_bytes(chain([9, 4, 7, 7, 3, 8, 8, 5, 5, 6]), 0.7)
    assert "optim" not in str(plan)
    assert str(plan.gap) in str(plan)
    assert plan.gap is plan.gap and plan == plan_of_bytes(plan.graph, 0.7)
    assert "gap" not in vars(pickle.loads(pickle.dumps(plan)))


def test_gaps_in_words():
    gap = Gap(3 * 2**20, 0.3, 2 * 2**20, 0.2, 2.0)
    assert (gap.bytes, gap.time, gap.overhead) == pytest.approx((0.5, 2.3 / 2.2 - 1, 0.5))
    assert str(gap) == (
        "peak 3.0 MiB, within 50.0% of the optimum (no plan as fast below 2.0); "
        "time +15.0%, within 4.6% of the optimum (no plan as small below +10.0%)"
    )
    assert str(Gap(2**20, 0.2, 2**20, 0.2, 2.0)) == (
        "peak 1.0 MiB, optimal (no plan as fast below 1.0); time +10.0%, optimal (no plan as small below +10.0%)"
    )
    assert Gap(1, 0.5, 1, 0.0, 1.0).overhead == math.inf


def without_scipy():
    sys.modules["scipy.optimize"] = None
    del sys.modules["ogc.plan.bounds"]
    plan = ogc.solve(chain([9, 4, 7, 7, 3, 8]), max_overhead=0.2)
    with pytest.raises(DependencyError, match="bounds need scipy, which is not installed: pip install scipy"):
        _ = plan.gap


@pytest.mark.full
def test_without_scipy_there_is_a_plan_and_no_gap():
    run_apart(without_scipy)


def test_a_plan_without_its_graph_has_no_gap():
    plan = replace(ogc.solve(chain([9, 4, 7, 7, 3, 8]), max_overhead=0.2), graph=None)
    with pytest.raises(PlanError, match="the plan does not know its graph"):
        _ = plan.gap

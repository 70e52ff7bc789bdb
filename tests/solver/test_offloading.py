"""The search over what is kept, recomputed and offloaded: against brute force, a recurrence on chains, and without."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from helpers import chain, random_graph, seeds
from offload_oracles import UNITS, chain_seconds, every_plan, least_wait

import ogc
from ogc.plan import Decisions
from ogc.plan.fast import Replay
from ogc.plan.schedule import Schedule
from ogc.plan.simulate import plain_peak
from ogc.solver.offloading.timing import timed

CLOSE = 1.06
"""A step may take so many times what it takes by an oracle: one operation of a chain of six more."""


WORST = 1.2
"""The same of graphs of a few operations, each of which takes much of a step; nine in ten take no longer at all."""


def solved(graph, budget):
    """The plan within a budget, or None."""
    try:
        plan = ogc.solve(graph, memory_budget=budget)
    except ogc.SolveError:
        return None
    cost = ogc.simulate(graph, plan)
    assert cost.peak_bytes == plan.peak_bytes <= budget and cost.added_seconds == plan.added_seconds
    return plan


@pytest.mark.parametrize(
    "count",
    [
        *(6, 10),
        *(pytest.param(count, marks=pytest.mark.full) for count in (8, 12, 16)),
        *(pytest.param(count, marks=pytest.mark.slow) for count in (24, 32, 40)),
    ],
)
def test_chains_take_little_longer_than_by_the_recurrence_of_fluid_copies(count):
    graph, ratios = chain([UNITS] * count), []
    for bandwidth in (1, 2, 4):
        for share in (0.7, 0.5, 0.35):
            budget = UNITS * max(2, int(share * count))
            least = chain_seconds(count, budget, bandwidth)
            plan = solved(replace(graph, host=ogc.Host(bandwidth, bandwidth)), budget)
            ratios.append((plan.step_seconds + plan.added_seconds) / (plan.step_seconds + least))
    assert max(ratios) <= CLOSE, ratios
    assert sorted(ratios)[len(ratios) // 2] <= 1.0


@pytest.mark.parametrize("seed", seeds(6, 40))
def test_small_graphs_take_little_longer_than_the_best_of_all_plans(seed):
    graph = replace(random_graph(seed, 5), host=ogc.Host(20.0, 20.0))
    front, step = every_plan(graph, 2), graph.step_seconds
    for share in (0.9, 0.8, 0.7):
        budget = int(share * plain_peak(graph))
        least = min((cost.added_seconds for cost in front if cost.peak_bytes <= budget), default=inf)
        plan = solved(graph, budget)
        if plan is None:
            assert least == inf
        else:
            assert step + plan.added_seconds <= WORST * (step + least), (seed, share)


@pytest.mark.parametrize("seed", range(8))
def test_moments_are_near_the_best_of_all(seed):
    rng = random.Random(seed)
    graph = replace(chain([rng.randrange(1, 9) for _ in range(6)]), host=ogc.Host(4.0, 3.0))
    profile = Replay(graph).profile(Decisions((ogc.saved(0, 6),)))
    for values in ((0,), (1,), (0, 1), (0, 2), (1, 3)):
        for share in (1.0, 0.8, 0.7):
            budget = int(share * plain_peak(graph))
            least, cost = least_wait(profile, values, budget), profile.offloading(timed(profile, values, budget))
            if least < inf:
                assert cost.peak_bytes <= budget
                assert graph.step_seconds + cost.added_seconds <= 1.1 * (graph.step_seconds + least)


@pytest.mark.parametrize("seed", seeds(1, 8))
def test_a_host_never_makes_a_plan_slower(seed):
    graph = random_graph(seed, 20)
    for share in (0.8, 0.6):
        alone = solved(replace(graph), share_of(graph, share))
        for rate in (0.5, 50.0):
            plan = solved(replace(graph, host=ogc.Host(rate, rate)), share_of(graph, share))
            assert alone is None or plan.added_seconds <= alone.added_seconds + 1e-9


def share_of(graph, share):
    return int(share * plain_peak(graph))


@pytest.mark.full
def test_what_fits_with_a_host_alone_is_found():
    """A chain whose operations must not run twice."""
    graph = chain([8] * 10)
    graph = replace(graph, operations=tuple(replace(op, replayable=False) for op in graph.operations))
    assert solved(graph, 40) is None
    plan = solved(replace(graph, host=ogc.Host(8.0, 8.0)), 40)
    assert plan.offloaded and not plan.recomputed_seconds and not plan.waiting_seconds
    slow = solved(replace(graph, host=ogc.Host(0.5, 0.5)), 40)
    assert slow.offloaded and slow.waiting_seconds > slow.step_seconds
    with pytest.raises(ogc.SolveError, match="no plan found peaks at or below"):
        ogc.solve(replace(graph, host=ogc.Host(8.0, 8.0)), memory_budget=9)


@pytest.mark.full
def test_the_slower_the_copies_the_less_is_offloaded():
    plans = [solved(replace(chain([8] * 20), host=ogc.Host(rate, rate)), 64) for rate in (0.25, 2.0, 4.0, 16.0)]
    assert not plans[0].offloaded and plans[-1].offloaded
    assert [plan.added_seconds for plan in plans] == sorted((plan.added_seconds for plan in plans), reverse=True)
    assert plans[-1].added_seconds == 0


@pytest.mark.parametrize("memory", [0, 20, 40, 1000])
def test_a_host_has_so_much_memory(memory):
    """What it has no room for is recomputed."""
    graph = replace(chain([8] * 20), host=ogc.Host(16.0, 16.0, memory=memory))
    plan, free = solved(graph, 64), solved(replace(graph, host=ogc.Host(16.0, 16.0)), 64)
    assert sum(graph.values[one.value].bytes for one in plan.offloaded) <= memory
    assert plan.peak_bytes <= 64 and bool(plan.recomputed_seconds) == (memory < 1000)
    assert plan.added_seconds >= free.added_seconds
    if memory < 1000:
        with pytest.raises(ogc.PlanError, match=f"more than the {memory} that the host has"):
            ogc.make_plan(graph, free.decisions)


GOALS = ({}, {"memory_budget": "least"}, {"max_overhead": 0.2}, {"max_overhead": 0.05})


@pytest.mark.parametrize("seed", seeds(2, 12))
@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_a_host_never_raises_the_peak_of_what_takes_so_long(goal, seed):
    graph, most = random_graph(seed, 20), goal.get("max_overhead", 1 / 3 if not goal else inf)
    alone = ogc.solve(replace(graph), **goal)
    for rate in (0.5, 50.0):
        plan = ogc.solve(replace(graph, host=ogc.Host(rate, rate)), **goal)
        cost = ogc.simulate(graph if not plan.offloaded else plan.graph, plan)
        assert (cost.peak_bytes, cost.added_seconds) == (plan.peak_bytes, plan.added_seconds)
        assert plan.peak_bytes <= alone.peak_bytes
        assert not plan.offloaded or plan.overhead <= most + 1e-9


@pytest.mark.parametrize("goal", GOALS[2:], ids=str)
def test_quick_copies_lower_the_peak_that_a_time_allows(goal):
    """A chain on whose time copies of all values take a quarter."""
    graph = chain([8] * 16)
    alone, plan = ogc.solve(graph, **goal), ogc.solve(replace(graph, host=ogc.Host(16.0, 16.0)), **goal)
    assert plan.offloaded and plan.peak_bytes < 0.8 * alone.peak_bytes
    curve = ogc.frontier(replace(graph, host=ogc.Host(16.0, 16.0)))
    assert sum(bool(one.offloaded) for one in curve.plans) >= 2


def test_no_operation_runs_more_than_twice_where_nothing_is_asked_for():
    graph = replace(random_graph(3, 20), host=ogc.Host(20.0, 20.0))
    plan = ogc.solve(graph)
    runs = Schedule(graph, plan.decisions).runs
    assert max(Counter(t for run in runs for t in run.program).values()) <= 2


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_the_curve_with_a_host_is_nowhere_above_the_one_without(seed):
    graph = random_graph(seed, 20)
    alone, curve = ogc.frontier(graph), ogc.frontier(replace(graph, host=ogc.Host(20.0, 20.0)), budgets=[0.6])
    ahead = list(itertools.pairwise(curve.plans))
    assert all(a.peak_bytes < b.peak_bytes and a.added_seconds >= b.added_seconds for a, b in ahead)
    for one in alone.plans:
        below = [plan.added_seconds for plan in curve.plans if plan.peak_bytes <= one.peak_bytes]
        assert min(below) <= one.added_seconds + 1e-9


def test_goals_of_one_graph_do_not_contradict_each_other():
    """The peak that a time has is within that time as a budget, and the other way round."""
    graph = replace(random_graph(5, 20), host=ogc.Host(20.0, 20.0))
    quick = ogc.solve(graph, max_overhead=0.1)
    assert quick.offloaded
    small = ogc.solve(graph, memory_budget=quick.peak_bytes)
    assert small.added_seconds <= quick.added_seconds
    assert ogc.solve(graph, max_overhead=small.overhead).peak_bytes <= small.peak_bytes

"""Plans that keep to what the user tells: against all plans of small graphs that do, and what it costs."""

import random
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product

import pytest
from helpers import random_graph, seeds
from oracles import _different_trees

import ogc
from ogc.errors import PlanError, SolveError
from ogc.plan import Decisions, Policy, plain_plan
from ogc.plan.fast import Replay
from ogc.plan.schedule import FORWARD, Schedule

MODULES = ["a", "b", "c"]


def named_graph(seed, most=5):
    """A random graph of which each operation is in one of three modules, without variants and outputs."""
    graph, rng = random_graph(seed, most), random.Random(seed)
    values = tuple(replace(value, is_output=False) for value in graph.values)
    graph = replace(graph, values=values).with_variants(())
    return replace(graph, operations=tuple(replace(op, module=rng.choice(MODULES)) for op in graph.operations))


def told_of(seed):
    """Some of keep, recompute and once, of modules that the graph of this seed has."""
    rng, names = random.Random(seed), sorted({op.module for op in named_graph(seed).operations})
    rng.shuffle(names)
    told = [(rng.choice(["keep", "once"]), names[:1]), ("recompute", names[-1:])]
    return dict([told[:1], told[-1:], told][seed % 3 if len(names) > 1 else 0])


def obeys(graph, decisions, told):
    """Whether a plan keeps to what is told, as the steps of its schedule have it."""
    schedule = Schedule(graph, decisions)
    once = {*told.get("keep", ()), *told.get("once", ())}
    for run in schedule.runs[1:]:
        if any(graph.operations[t].module in once and graph.operations[t].writes for t in run.program):
            return False
    fixed = {v for op in graph.operations if op.module in once or not op.replayable for v in op.writes}
    lost = set(told.get("recompute", ()))
    for (run, v), last in schedule.last_needs.items():
        is_lost = graph.operations[graph.last_writes[v]].module in lost and v not in fixed
        if run == FORWARD and is_lost and last >= len(graph):
            return False
    return True


def all_plans(graph, most=3_000):
    """Peak, time and decisions of all trees, with any policies of at most three values, as far as there is time."""
    costs, values, found, tried = Replay(graph), range(len(graph.values)), [], 0
    for count in range(4):
        for chosen, policies in product(combinations(values, count), product(Policy, repeat=count)):
            for tree in _different_trees(graph.cuts):
                decisions, tried = Decisions(tree, tuple(zip(chosen, policies, strict=True))), tried + 1
                with suppress(PlanError):
                    found.append((*costs(decisions)[:2], decisions))
            if tried > most:
                return found
    return found


def best_of_all(graph, told, rank, limit=lambda peak, seconds: True):
    """The best rank of all plans that keep to it, and to a limit; None if none does."""
    plans = sorted((plan for plan in all_plans(graph) if limit(*plan[:2])), key=lambda plan: rank(*plan[:2]))
    return next((rank(*plan[:2]) for plan in plans if obeys(graph, plan[2], told)), None)


def solved(graph, told, **goal):
    """The plan, or None where there is none; it keeps to what is told."""
    try:
        plan = ogc.solve(graph, effort=1, **goal, **told)
    except SolveError:
        return None
    assert obeys(graph, plan.decisions, told)
    return plan


@pytest.mark.parametrize("seed", seeds(12, 120))
def test_no_plan_that_keeps_to_it_peaks_lower(seed):
    graph, told = named_graph(seed), told_of(seed)
    best, plan = best_of_all(graph, told, lambda peak, seconds: peak), solved(graph, told, memory_budget="least")
    assert (best is None) or (plan is not None and plan.peak_bytes <= best + 0.005 * plan.plain_peak_bytes)


@pytest.mark.parametrize("seed", seeds(12, 120))
def test_no_plan_that_keeps_to_it_is_faster_within_a_budget(seed):
    graph, told = named_graph(seed), told_of(seed)
    budget = int(0.75 * plain_plan(graph).peak_bytes)
    best = best_of_all(graph, told, lambda peak, seconds: seconds, lambda peak, seconds: peak <= budget)
    plan = solved(graph, told, memory_budget=budget)
    assert plan is None or plan.peak_bytes <= budget
    assert best is None or (plan is not None and plan.added_seconds <= best + 1e-9)


def test_what_stands_in_the_way_is_named():
    graph = named_graph(20, most=12)
    least = ogc.solve(graph, memory_budget="least", keep=[MODULES[0]]).peak_bytes
    assert ogc.solve(graph, memory_budget=least, keep=[MODULES[0]]).peak_bytes <= least
    message = r"with keep=\['a'\] no plan found peaks at or below .*; without, the plan is: peak "
    with pytest.raises(SolveError, match=message) as error:
        ogc.solve(graph, memory_budget=least - 1, keep=[MODULES[0]])
    assert error.value.least_peak_bytes == least
    with pytest.raises(
        SolveError, match=r"with recompute=\['a'\] no plan found takes at most 0.0% more time; the least is"
    ):
        ogc.solve(graph, max_overhead=0, recompute=["a"])


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_what_it_costs_against_the_free_plan_is_told(seed):
    graph = named_graph(seed, most=12)
    for goal in ({}, {"memory_budget": "least"}, {"max_overhead": 0.3}):
        free = ogc.solve(replace(graph), effort=0, **goal)  # with moves, what is known beforehand counts
        plan = ogc.solve(graph, effort=0, **goal, keep=[graph.operations[0].module])
        assert plan.free == (free.peak_bytes, free.added_seconds) and free.free is None
        cost = (
            f"{(plan.peak_bytes - free.peak_bytes) / 2**20:+.1f} MiB and {plan.overhead - free.overhead:+.1%} of a step"
        )
        assert plan.summary.endswith(f"; what was told costs {cost}")
        assert plan.graph is graph and plan.is_plain | (ogc.simulate(graph, plan).peak_bytes == plan.peak_bytes)


@pytest.mark.parametrize("seed", seeds(4, 20))
def test_the_curve_keeps_to_it(seed):
    graph = named_graph(seed, most=15)
    told = {("keep", "recompute")[seed % 2]: [graph.operations[0].module]}
    plans = ogc.frontier(graph, points=5, **told).plans
    assert plans and all(obeys(graph, plan.decisions, told) for plan in plans)
    assert [plan.peak_bytes for plan in plans] == sorted(plan.peak_bytes for plan in plans)

"""What a plan is where nothing is asked for: what about one forward more can buy."""

from collections import Counter
from dataclasses import replace

import pytest
from helpers import chain, random_graph
from interval_oracle import all_flat_plans
from stacks import stack

import ogc
from ogc.errors import InputError
from ogc.plan.schedule import Schedule
from ogc.solver import FAIR_OVERHEAD, NEGLIGIBLE
from ogc.solver.search import NEAR_KNEE, search_of


def assert_is_fair(graph):
    plan, least = ogc.solve(graph), ogc.solve(graph, memory_budget="least")
    runs = Schedule.of_step(graph, plan, "none").runs
    assert max(Counter(t for run in runs for t in run.program).values()) <= 2
    assert plan.overhead <= FAIR_OVERHEAD + 1e-9
    assert plan.floor[0] >= least.floor[0]
    assert plan.floor[0] <= plan.peak_bytes <= plan.plain_peak_bytes
    assert least.is_plain or (least.peak_bytes, least.added_seconds) == least.floor
    return plan


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_of_one_level_buys_more(seed):
    graph = random_graph(seed, most=7)
    graph = graph.with_variants(())
    plan = assert_is_fair(graph)
    limit = FAIR_OVERHEAD * graph.step_seconds
    peak = min(peak for peak, seconds in all_flat_plans(graph) if seconds <= limit)
    assert plan.peak_bytes <= NEAR_KNEE * peak + NEGLIGIBLE * plan.plain_peak_bytes


@pytest.mark.parametrize("seed", range(40, 50))
def test_it_is_fair_with_low_memory_variants_and_in_long_programs_too(seed):
    assert_is_fair(random_graph(seed, most=40))


@pytest.mark.full
def test_equal_layers_cost_what_a_checkpoint_around_each_costs_at_most():
    for seed in range(4):
        graph = stack(seed, layers=16)
        assert assert_is_fair(graph).peak_bytes < 0.9 * ogc.solve(graph, solver="none").peak_bytes


@pytest.mark.parametrize("seed", [3, 7, 13])
def test_a_little_more_memory_that_saves_much_time_is_taken(seed):
    graph = random_graph(seed, most=30)
    least = search_of(graph, nested=False).within(FAIR_OVERHEAD * graph.step_seconds)
    plan = ogc.solve(graph, effort=0)
    assert least.peak_bytes < plan.peak_bytes <= NEAR_KNEE * least.peak_bytes
    assert plan.overhead < least.seconds / graph.step_seconds - 0.05


def test_nothing_is_bought_at_more_than_a_third():
    graph = chain([1_000_000] * 12)
    assert not ogc.solve(graph, memory_budget="least").is_plain
    dear = replace(graph, operations=tuple(replace(op, forward_seconds=9.0) for op in graph.operations))
    plan = ogc.solve(dear)
    assert plan.overhead <= FAIR_OVERHEAD and plan.floor[0] < plan.plain_peak_bytes
    assert f"floor {plan.floor[0] / 2**20:.1f} MiB at +" in plan.summary


@pytest.mark.parametrize("asked", [{"memory_budget": "less"}, {"memory_budget": "least", "max_overhead": 0.1}])
def test_only_the_word_least_is_a_budget(asked):
    with pytest.raises(InputError, match=r"'least'|not both"):
        ogc.solve(chain([1, 2, 3]), **asked)


def test_reference_solvers_take_no_such_goal():
    with pytest.raises(InputError, match="only 'optimal' does"):
        ogc.solve(chain([1, 2, 3]), memory_budget="least", solver="chen")

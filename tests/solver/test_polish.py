"""The local search over all that a plan can say, and what is known of a graph from one goal to the next."""

from dataclasses import replace

import pytest
from exact import least_peak
from helpers import chain, random_graph, seeds
from stacks import stack

import ogc
from ogc.errors import InputError, SolveError
from ogc.plan import Decisions, plain_plan, recomputed, saved
from ogc.plan.fast import Replay
from ogc.solver.candidates import weigh
from ogc.solver.polish import Aim, _first, polished

GOALS = [
    *({"memory_budget": share} for share in (0.9, 0.75, 0.6, 0.5)),
    *({"max_overhead": share} for share in (0.05, 0.1, 0.2, 0.4)),
    {"memory_budget": "least"},
]


def answers(graph, **more):
    """Peak and time for each goal; None where nothing fits."""
    found = []
    for goal in GOALS:
        try:
            plan = ogc.solve(graph, **goal, **more)
            found.append((plan.peak_bytes, plan.added_seconds))
        except SolveError as error:
            found.append(error.least_peak_bytes)
    return found


def keeps(goal, plain, peak, seconds):
    if "max_overhead" in goal:
        return seconds <= goal["max_overhead"] * plain.step_seconds * (1 + 1e-9)
    return goal["memory_budget"] == "least" or peak <= goal["memory_budget"] * plain.peak_bytes


@pytest.mark.parametrize("seed", seeds(4, 12))
def test_what_it_finds_is_no_worse_and_keeps_the_bound(seed):
    graph = random_graph(seed, most=40)
    plain, costs = plain_plan(graph), Replay(graph)
    for goal in GOALS:
        try:
            start = weigh(costs, ogc.solve(replace(graph), effort=0, **goal).decisions)
        except SolveError:
            continue
        share = goal.get("memory_budget")
        budget = None if share in (None, "least") else max(start.peak_bytes, int(share * plain.peak_bytes))
        limit = None if share is not None else max(start.seconds, goal["max_overhead"] * plain.step_seconds)
        aim = Aim(plain.peak_bytes, plain.step_seconds, budget, limit)
        found = polished(costs, start, aim, 400)
        assert not aim.excess(found) and aim.price(found) <= aim.price(start)
        assert found == polished(Replay(graph), start, aim, 400)
        cost = ogc.simulate(graph, found.decisions)
        assert (cost.peak_bytes, cost.added_seconds) == (found.peak_bytes, pytest.approx(found.seconds))


def test_it_ends_where_a_peak_is_enough():
    graph = random_graph(5, most=40)
    plain, costs = plain_plan(graph), Replay(graph)
    aim, start = Aim(plain.peak_bytes, plain.step_seconds), weigh(costs, plain.decisions)
    least = polished(costs, start, aim, 2000)
    assert least.peak_bytes < start.peak_bytes
    assert polished(costs, start, aim, 2000, enough=start.peak_bytes) == start
    middle = (least.peak_bytes + start.peak_bytes) // 2
    assert least.peak_bytes <= polished(costs, start, aim, 2000, enough=middle).peak_bytes <= middle


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_no_answer_beats_another_on_its_own_ground(seed):
    graph = random_graph(seed, most=30)
    plain = plain_plan(graph)
    answers(graph, effort=1)
    found = answers(graph, effort=1)  # with all that is known
    assert found == answers(graph, effort=1)
    for goal, answer in zip(GOALS, found, strict=True):
        possible = [each for each in found if isinstance(each, tuple) and keeps(goal, plain, *each)]
        if not isinstance(answer, tuple):
            assert not possible
        elif isinstance(goal.get("memory_budget"), float):
            assert answer[1] <= min(seconds for _, seconds in possible) + 0.002 * plain.step_seconds
        else:
            assert answer[0] <= min(peak for peak, _ in possible) + 0.005 * plain.peak_bytes


@pytest.mark.parametrize("seed", range(20, 32))
def test_more_effort_comes_near_the_exact_optimum(seed):
    graph = random_graph(seed, most=8).with_variants(())
    least, exact = ogc.solve(graph, memory_budget="least", effort=2), least_peak(graph)
    assert exact <= least.peak_bytes <= 1.1 * exact + 5


@pytest.mark.full
def test_equal_layers_are_improved_together():
    gains = []
    for seed in range(4):
        graph = stack(seed, layers=12)
        plans = [ogc.solve(replace(graph), max_overhead=0.1, effort=effort) for effort in (0, 2)]
        assert plans[1].overhead <= 0.1
        gains.append(plans[1].peak_bytes / plans[0].peak_bytes)
    assert max(gains) <= 1 and min(gains) < 0.98, gains


def test_the_first_round_begins_without_what_is_read_across_the_program():
    """A wide skip is made again from its cheap operation; narrow ones, and those that are short, stay."""
    graph = chain([40, 40, *[10] * 7, 1, *[10] * 7, 5])
    for v, read_at, is_long in ((1, 16, True), (1, 3, False), (9, 16, False)):
        op = graph.operations[read_at]
        skipped = replace(op, reads=(v, *op.reads), saves=(v, *op.saves))
        operations = (*graph.operations[:read_at], skipped, *graph.operations[read_at + 1 :])
        long = replace(graph, operations=operations)
        costs, plain = Replay(long), plain_plan(long)
        start = weigh(costs, Decisions((saved(0, 9), recomputed(9, 18))))
        aim = Aim(plain.peak_bytes, plain.step_seconds, None, 0.2 * plain.step_seconds)
        found = _first(costs, start, aim)
        assert found.decisions.recomputed_values == ((v,) if is_long else ())
        assert aim.price(polished(costs, start, aim, 300)) <= aim.price(start)


def test_the_first_round_for_the_least_peak_begins_between_all_cuts():
    graph = chain([10] * 120)
    costs, plain = Replay(graph), plain_plan(graph)
    start = weigh(costs, Decisions((saved(0, 60), recomputed(60, 120))))
    decisions = _first(costs, start, Aim(plain.peak_bytes, plain.step_seconds)).decisions
    assert len(decisions.segments) == 120 and len(decisions.recomputed_values) == 119
    assert _first(costs, start, Aim(plain.peak_bytes, plain.step_seconds, plain.peak_bytes)) == start


@pytest.mark.parametrize("effort", [-1, 4, 1.5, "much", True])
def test_another_effort_is_refused(effort):
    with pytest.raises(InputError, match="effort must be 0, 1, 2 or 3"):
        ogc.solve(random_graph(1), effort=effort)

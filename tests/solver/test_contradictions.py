"""Of all that is asked of one graph, no answer is worse than another one shows to be possible."""

import importlib
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers import chain, random_graph
from stacks import stack

import ogc
from ogc.errors import SolveError
from ogc.plan import plain_plan
from ogc.plan.schedule import Schedule
from ogc.solver import FAIR_OVERHEAD, NEGLIGIBLE
from ogc.solver.search import Search

BUDGETS = [{"memory_budget": share} for share in (0.9, 0.7, 0.5, 0.3)]
OVERHEADS = [{"max_overhead": share} for share in (0.05, 0.1, 0.2, 0.3, 0.5)]
GOALS = [*BUDGETS, *OVERHEADS, {"memory_budget": "least"}, {}]


def runs_most(graph, plan):
    programs = [run.program for run in Schedule.of_step(graph, plan, "none").runs]
    return max(sum(t in program for program in programs) for t in range(len(graph)))


class Asked:
    """Goals asked one after the other, and what was known before each."""

    def __init__(self, graph, told):
        self.graph, self.plain, self.told, self.known = graph, plain_plan(graph), told, []

    def ask(self, goal):
        """The plan for a goal, or None; no plan known before may be better, but for what is negligible."""
        try:
            plan = ogc.solve(self.graph, **goal, **self.told)
        except SolveError:
            assert not [known for known in self.known if self.keeps(goal, known)], goal
            return None
        better = [known for known in self.known if self.keeps(goal, known) and self.beats(goal, known, plan)]
        assert not better, (goal, plan.summary, better[0].summary)
        assert plan.is_plain or self.keeps(goal, plan)
        self.known.append(plan)
        return plan

    def curve(self):
        plans = ogc.frontier(self.graph, points=5, **self.told).plans
        for known in self.known:
            assert any(p.peak_bytes <= known.peak_bytes and p.added_seconds <= known.added_seconds for p in plans)
        self.known += plans

    def keeps(self, goal, plan):
        budget, share = goal.get("memory_budget"), goal.get("max_overhead")
        if isinstance(budget, float):
            return plan.peak_bytes <= int(budget * self.plain.peak_bytes)
        if goal == {}:
            return plan.added_seconds <= FAIR_OVERHEAD * self.plain.step_seconds and runs_most(self.graph, plan) <= 2
        return share is None or plan.added_seconds <= share * self.plain.step_seconds

    def beats(self, goal, one, other):
        slack = NEGLIGIBLE * self.plain.peak_bytes if other.is_plain else 0
        less, faster = one.peak_bytes < other.peak_bytes - slack, one.added_seconds < other.added_seconds - 1e-9
        if goal == {}:  # which weighs both
            return less and faster
        return faster if goal in BUDGETS else less


def assert_consistent(graph, seed, **told):
    asked, goals = Asked(graph, told), GOALS * 2 + [None]
    random.Random(seed).shuffle(goals)
    for goal in goals:
        asked.curve() if goal is None else asked.ask(goal)
    budgets, overheads = ([asked.ask(goal) for goal in some] for some in (BUDGETS, OVERHEADS))
    times = [plan.added_seconds for plan in budgets if plan]
    peaks = [plan.peak_bytes for plan in overheads if plan]
    assert times == sorted(times), "less memory never takes less time"
    assert [plan is None for plan in budgets] == sorted(plan is None for plan in budgets)
    assert [plan is None for plan in overheads] == sorted((plan is None for plan in overheads), reverse=True)
    slack = NEGLIGIBLE * asked.plain.peak_bytes
    assert all(more <= less + slack for less, more in pairwise(peaks)), "nor more time more memory"


@pytest.mark.parametrize("seed", range(4))
def test_no_answer_contradicts_another_in_any_order(seed):
    assert_consistent(random_graph(seed, most=8 if seed % 2 else 25), seed)


@pytest.mark.full
@pytest.mark.parametrize("argument", ["keep", "recompute"])
def test_nor_where_something_is_told(argument):
    graph = random_graph(5, most=20)
    operations = tuple(replace(op, module="abc"[t % 3]) for t, op in enumerate(graph.operations))
    assert_consistent(replace(graph, operations=operations), 0, **{argument: ["a"]})


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 40))
def test_nor_on_more_and_longer_graphs(seed):
    assert_consistent(random_graph(seed, most=40), seed)


@pytest.mark.full
def test_nor_where_layers_are_equal_and_cuts_many():
    assert_consistent(stack(0, layers=30), 0)


def test_a_plan_of_a_method_to_compare_with_is_known_too():
    graph = random_graph(3, most=25)
    plan = ogc.solve(graph, solver="binomial")
    assert ogc.solve(graph, memory_budget="least").peak_bytes <= plan.peak_bytes
    assert ogc.solve(graph, memory_budget=plan.peak_bytes).added_seconds <= plan.added_seconds + 1e-12


@pytest.mark.parametrize("seed", [9, 13, 19, 21])
def test_a_budget_below_what_the_program_finds_is_met_where_the_local_search_can(seed):
    graph = random_graph(seed, most=25)
    least, moved = (ogc.solve(replace(graph), memory_budget="least", effort=effort).peak_bytes for effort in (0, 1))
    assert moved < least
    assert ogc.solve(replace(graph), memory_budget=moved).peak_bytes <= moved


def test_what_was_looked_for_is_not_looked_for_again(monkeypatch):
    graph, goals = random_graph(4, most=25), [{"max_overhead": 0.2}, {"memory_budget": 0.01}, {}]

    def answers(effort):
        found = [ogc.frontier(graph, points=5).plans]
        for goal in goals:
            try:
                found.append(ogc.solve(graph, effort=effort, **goal).decisions)
            except SolveError as error:
                found.append(str(error))
        return found

    answers(1)
    found = answers(1)  # with all that is known
    solving = importlib.import_module("ogc.solver.solve")
    for name in ("_look", "polished"):
        monkeypatch.setattr(solving, name, lambda *_, **__: pytest.fail("looked for again"))
    monkeypatch.setattr(Search, "curve", lambda *_: pytest.fail("looked for again"))
    assert answers(1) == answers(0) == found
    with pytest.raises(pytest.fail.Exception):
        answers(2)


def test_a_budget_below_every_operation_is_refused_without_tables(monkeypatch):
    """Of few bytes where operations take billions: a table would have a unit for each."""
    monkeypatch.setattr(Search, "_fitting", lambda *_: pytest.fail("a table was asked for"))
    with pytest.raises(SolveError, match=r"at or below 0.0 MiB \(1000 bytes\); the smallest peak is"):
        ogc.solve(chain([2**31] * 8), memory_budget=1000)

"""Plans that another rank made: taken where they fit, else made anew."""

from dataclasses import replace

import pytest
from helpers import chain

import ogc
from ogc import planning


@pytest.fixture
def other_rank(monkeypatch):
    """Lets another rank be the first to answer."""

    def answers(decisions, budget=None):
        monkeypatch.setattr(planning, "first_of_all", lambda question, answer: (decisions, "optimal", budget))

    return answers


GRAPH = chain([10] * 6)


def test_the_first_plan_is_taken(other_rank):
    plan = ogc.solve(GRAPH, memory_budget="least")
    other_rank(plan.decisions)
    assert planning.agreed_plan(GRAPH, "least", lambda: pytest.fail("it is planned again")) == plan


@pytest.mark.parametrize("decisions, budget", [((ogc.saved(0, 3),), None), ((ogc.saved(0, 6),), 1)])
def test_a_plan_that_does_not_fit_is_made_anew(other_rank, decisions, budget):
    other_rank(ogc.plan.Decisions(decisions), budget)
    plan = ogc.solve(GRAPH, memory_budget="least")
    assert planning.agreed_plan(GRAPH, "least", lambda: plan) is plan


def test_questions_differ_as_graphs_and_goal_do():
    asked = {planning.question(goal, [chain(sizes)]) for goal in ("a", "b") for sizes in ([10] * 6, [10] * 5 + [11])}
    assert len(asked) == 4
    assert planning.question("a", [chain([10] * 6)]) == planning.question("a", [chain([10] * 6)])


def test_each_rank_may_have_a_device_of_its_own():
    one, other = (planning.question("a", [replace(GRAPH, device=device)]) for device in ("cuda:0", "cuda:1"))
    assert one == other != planning.question("a", [replace(GRAPH, device="cpu")])

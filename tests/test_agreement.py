"""Where plans are looked for, in which order; plans of another rank are taken where they fit, else made anew."""

from dataclasses import dataclass, field, replace

import pytest
from helpers import chain

import ogc
from ogc import planning
from ogc.parser import ParseOptions
from ogc.plan import plan_on
from ogc.plan.saving import structure_of
from ogc.planning import Given, OfGraph, PlanOptions, Store, look_for
from ogc.solver import LEAST_PEAK, Goal, SolveOptions

GRAPH = chain([10] * 6)
LEAST = PlanOptions(ParseOptions(), SolveOptions(LEAST_PEAK))
PLAN = ogc.solve(GRAPH, memory_budget="least")
OTHER = replace(ogc.make_plan(GRAPH, (ogc.saved(0, 6),)), solver="other")


@dataclass(frozen=True)
class Toy(OfGraph):
    """It notes where it is looked for, and holds nothing but the plans of one solver."""

    holds: str = "optimal"
    seen: list = field(default_factory=list)

    @property
    def asked(self):
        return ("toy", structure_of(self.graph))

    def taken_up(self, saved):
        self.seen.append(f"taken up {saved.solver}")
        return (self.graph, plan_on(self.graph, saved)) if saved.solver == self.holds else None

    def searched(self):
        self.seen.append("searched")
        return self.graph, PLAN


@pytest.fixture
def ranks(monkeypatch):
    """What the ranks have answered, by question; the last entry of a list in it comes while this one searches."""
    answers = {}
    monkeypatch.setattr(planning, "are_several", lambda: True)
    monkeypatch.setattr(planning, "answer_of_ranks", lambda key: answers.get(key))
    monkeypatch.setattr(planning, "first_answer", lambda key, mine: answers.setdefault(key, mine))
    return answers


def test_the_order(tmp_path, ranks):
    store = Store(str(tmp_path))
    wanted = Toy(replace(LEAST, store=store), GRAPH)
    assert look_for(wanted, Given(PLAN.as_saved())) == (GRAPH, PLAN) and wanted.seen == ["taken up optimal"]
    assert not ranks and not list(tmp_path.iterdir())  # what was given is nobody else's

    wanted = Toy(wanted.options, GRAPH)
    assert look_for(wanted, Given(OTHER.as_saved())) == (GRAPH, PLAN)
    assert wanted.seen == ["taken up other", "searched"]
    assert list(ranks) == [wanted.key] and [path.stem for path in tmp_path.iterdir()] == [wanted.key]

    wanted = Toy(wanted.options, GRAPH)
    assert look_for(wanted) == (GRAPH, PLAN) and wanted.seen == []  # that of a rank
    ranks.clear()
    assert look_for(Toy(wanted.options, GRAPH, seen=wanted.seen))[1] == PLAN and wanted.seen == ["taken up optimal"]
    assert list(ranks) == [wanted.key]


def test_a_plan_that_was_given_has_to_fit_unless_it_need_not(caplog):
    saved = ogc.solve(chain([10] * 5), memory_budget="least").as_saved()
    with pytest.raises(ogc.PlanError, match="does not fit the graph"):
        look_for(Toy(LEAST, GRAPH), Given(saved))
    with caplog.at_level("INFO", "ogc.planning"):
        assert look_for(Toy(LEAST, GRAPH), Given(saved, must_fit=False)) == (GRAPH, PLAN)
    assert "a plan is made anew, as the saved one does not do: the plan does not fit the graph" in caplog.text


@pytest.mark.parametrize("is_quicker", [False, True])
def test_the_first_plan_is_taken(ranks, is_quicker):
    wanted = Toy(LEAST, GRAPH)
    assert not is_quicker or wanted.known is None
    ranks[wanted.key] = OTHER.as_saved()
    _, plan = look_for(wanted)
    assert plan.decisions == OTHER.decisions and wanted.seen == ["searched"] * is_quicker


@pytest.mark.parametrize("is_quicker", [False, True])
@pytest.mark.parametrize("budget, graph", [(None, chain([10] * 5)), (1, GRAPH)])
def test_a_plan_that_does_not_fit_is_made_anew(ranks, caplog, budget, graph, is_quicker):
    wanted = Toy(LEAST, GRAPH)
    assert not is_quicker or wanted.known is None
    plan = ogc.make_plan(graph, (ogc.saved(0, len(graph)),))
    ranks[wanted.key] = replace(plan, budget_bytes=budget).as_saved()
    with caplog.at_level("INFO", "ogc.planning"):
        assert look_for(wanted) == (GRAPH, PLAN)
    assert caplog.text.count("the plan of another rank does not fit") == 1


def test_keys_differ_as_graphs_and_goals_do():
    goals = ({}, {"goal": LEAST_PEAK}, {"goal": Goal(max_overhead=0.2)}, {"goal": Goal("1kB")}, {"effort": 2})
    graphs = chain([10] * 6), chain([10] * 5 + [11])
    options = [replace(LEAST, solving=SolveOptions(**goal)) for goal in goals]
    assert len({Toy(one, graph).key for one in options for graph in graphs}) == 10
    assert Toy(LEAST, chain([10] * 6)).key == Toy(LEAST, GRAPH).key
    same = (replace(LEAST, solving=SolveOptions(Goal(budget))) for budget in ("1kB", "1000", 1000))
    assert len({Toy(one, GRAPH).key for one in same}) == 1


def test_each_rank_may_have_a_device_of_its_own():
    one, other = (Toy(LEAST, replace(GRAPH, device=device)).key for device in ("cuda:0", "cuda:1"))
    assert one == other != Toy(LEAST, replace(GRAPH, device="cpu")).key

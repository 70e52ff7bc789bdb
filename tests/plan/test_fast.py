"""The compiled replay is the simulator, whatever the plan."""

import random
from dataclasses import replace

import pytest
from helpers import random_decisions, random_graph, tree_and_values

import ogc
from ogc.plan import fast
from ogc.plan.decisions import Decisions
from ogc.plan.fast import Replay

needs_compiled = pytest.mark.skipif(fast.library() is None, reason="replay.c was not compiled: no C compiler")
SIZES = 4, 8, 12, 20, 30


def compare(seed, plans=10):
    """Random plans of a random graph, with both; how many may be carried out."""
    rng = random.Random(seed)
    graph = random_graph(seed, rng.choice(SIZES))
    costs, found = Replay(graph), 0
    assert costs.is_compiled
    for _ in range(plans):
        decisions = Decisions.of(rng.choice((tree_and_values, random_decisions))(graph, rng))
        decisions = replace(decisions, low_memory=tuple(t for t in graph.low_memory if rng.random() < 0.5))
        try:
            expected = ogc.simulate(graph, decisions)
        except ogc.PlanError as error:
            with pytest.raises(ogc.PlanError) as raised:
                costs(decisions)
            assert str(raised.value) == str(error) and costs.if_possible(decisions) is None
            continue
        cost, found = costs(decisions), found + 1
        assert cost == costs.if_possible(decisions)
        assert cost.peak_bytes == expected.peak_bytes, (seed, decisions)
        assert cost.peak_values == expected.peak_values
        assert cost.added_seconds == pytest.approx(expected.added_seconds)
    return found


@needs_compiled
def test_random_plans_cost_what_the_simulator_says():
    assert sum(map(compare, range(60))) > 400


@needs_compiled
@pytest.mark.slow
def test_ten_thousand_random_plans_cost_what_the_simulator_says():
    assert sum(map(compare, range(1000, 2300))) > 10_000


@needs_compiled
@pytest.mark.parametrize(
    "segments, policies",
    [
        ((ogc.saved(0, 3),), ()),
        ((ogc.saved(0, 4), ogc.saved(5, 8)), ()),
        ((ogc.saved(0, 9),), ()),
        ((ogc.recomputed(0, 8, ogc.saved(0, 4)),), ()),
        ((ogc.saved(0, 8),), ((99, ogc.Policy.RECOMPUTED),)),
    ],
)
def test_what_is_no_plan_is_refused_in_the_words_of_the_simulator(segments, policies):
    graph = ogc.Graph(
        tuple(ogc.Operation(str(t), reads=(t - 1,) if t else (), writes=(t,), saves=(t,)) for t in range(8)),
        tuple(ogc.Value(str(v), 10) for v in range(8)),
    )
    with pytest.raises(ogc.PlanError) as expected:
        ogc.simulate(graph, Decisions(segments, policies))
    with pytest.raises(ogc.PlanError) as found:
        Replay(graph)(Decisions(segments, policies))
    assert str(found.value) == str(expected.value)


@needs_compiled
@pytest.mark.parametrize("operation", [-1, 99])
def test_variants_of_operations_that_there_are_not_are_refused(operation):
    graph = random_graph(3)
    with pytest.raises(ogc.PlanError, match="which the graph lacks"):
        Replay(graph)(Decisions((ogc.saved(0, len(graph)),), low_memory=(operation,)))


def test_without_a_compiler_the_simulator_is_asked(monkeypatch):
    monkeypatch.setattr(fast, "library", lambda: None)
    graph = random_graph(3)
    costs, decisions = Replay(graph), Decisions((ogc.saved(0, len(graph)),))
    assert not costs.is_compiled
    assert costs(decisions).peak_bytes == ogc.simulate(graph, decisions).peak_bytes
    assert costs.if_possible(decisions) == costs(decisions)
    assert costs.if_possible(Decisions((ogc.saved(0, len(graph) - 1),))) is None


@needs_compiled
def test_graphs_let_go_of_what_was_compiled_for_them(monkeypatch):
    freed = []
    library = fast.library()

    class Library:
        ogc_new, ogc_replay = library.ogc_new, library.ogc_replay

        @staticmethod
        def ogc_delete(state):
            freed.append(state)
            library.ogc_delete(state)

    monkeypatch.setattr(fast, "library", lambda: Library)
    costs = Replay(random_graph(3))
    del costs
    assert len(freed) == 1

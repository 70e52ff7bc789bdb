"""Long programs: few cuts are looked at first, then those like the ones that a plan uses, in every layer."""

from dataclasses import replace

import numpy as np
import pytest
from stacks import stack, with_views

import ogc
from ogc.plan import plain_plan
from ogc.solver import search
from ogc.solver.cuts import alike
from ogc.solver.search import Search

LENGTH = 12


@pytest.fixture
def few_cuts(monkeypatch):
    """Programs of some hundred operations are long."""
    monkeypatch.setattr(search, "FEW_CUTS", 100)
    monkeypatch.setattr(search, "FIRST_CUTS", 80)


def all_cuts_at_once(graph, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(search, "FEW_CUTS", 10**9)
        found = Search(graph)
        assert found._some_cuts is found._all_cuts
    return found


def test_cuts_at_the_same_place_of_equal_layers_are_alike():
    graph = stack(0, layers=10)
    kinds = alike(graph, np.array(graph.cuts))
    by_place = kinds[2 * LENGTH : 8 * LENGTH].reshape(6, LENGTH)  # the ends of the program differ
    assert (by_place == by_place[0]).all()
    assert len(set(by_place[0])) == LENGTH


def test_cuts_near_a_layer_of_another_width_are_of_their_own_kind():
    graph = stack(0, layers=10)
    wide = range(5 * LENGTH, 6 * LENGTH)
    values = tuple(replace(v, bytes=3 * v.bytes) if n in wide else v for n, v in enumerate(graph.values))
    kinds = alike(replace(graph, values=values), np.array(graph.cuts))
    assert not set(kinds[wide.start : wide.stop]) & set(kinds[: 4 * LENGTH])
    assert kinds[3 * LENGTH] == kinds[7 * LENGTH + LENGTH]


@pytest.mark.parametrize("seed", range(4))
def test_the_cuts_that_a_plan_uses_are_looked_at_in_every_layer(seed, few_cuts):
    graph = stack(seed, layers=16)
    found = Search(graph)
    plan = found.fastest(plain_plan(graph).peak_bytes // 2)
    cuts = found._around([plan]).cuts
    used = {cut for segment in plan.decisions.segments for cut in search._ends(segment)}
    assert used <= set(cuts.tolist())
    kinds = dict(zip(graph.cuts, alike(graph, np.array(graph.cuts)).tolist(), strict=True))
    elsewhere = [cut for cut in cuts.tolist() if cut not in used and kinds[cut] in {kinds[u] for u in used}]
    assert elsewhere
    assert len(cuts) <= max(search.FIRST_CUTS, len(used), len(set(kinds.values())))


@pytest.mark.full
@pytest.mark.parametrize(("seed", "share"), [(0, 0.1), (1, 0.05), (2, 0.3)])
def test_a_time_buys_no_larger_peak_than_with_all_cuts(seed, share, monkeypatch):
    graph = stack(seed, layers=13, length=24)
    seconds = share * graph.step_seconds
    whole = all_cuts_at_once(graph, monkeypatch).within(seconds)
    found = Search(graph).within(seconds)
    assert found.seconds <= seconds
    assert found.peak_bytes <= 1.02 * whole.peak_bytes


@pytest.mark.full
@pytest.mark.parametrize(("seed", "share"), [(0, 0.5), (1, 0.3), (2, 0.7)])
def test_a_budget_costs_no_more_time_than_with_all_cuts(seed, share, monkeypatch):
    graph = stack(seed, layers=13, length=24)
    peak = int(share * plain_plan(graph).peak_bytes)
    whole = all_cuts_at_once(graph, monkeypatch).fastest(peak)
    found = Search(graph).fastest(peak)
    assert found.peak_bytes <= peak
    assert found.seconds <= whole.seconds + 0.01 * graph.step_seconds


@pytest.mark.full
def test_a_budget_near_the_least_peak_is_met_with_all_cuts(few_cuts):
    graph = stack(1, layers=16)
    least = ogc.solve(graph, memory_budget="least")
    plan = ogc.solve(graph, memory_budget=least.peak_bytes)
    assert plan.peak_bytes <= least.peak_bytes


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 4])
def test_views_take_no_memory(seed):
    graph = stack(seed, layers=16)
    assert (
        ogc.solve(with_views(graph, seed), memory_budget="least", effort=0).peak_bytes
        == ogc.solve(graph, memory_budget="least", effort=0).peak_bytes
    )


@pytest.mark.full
@pytest.mark.parametrize("seed", [5, 7])
def test_a_budget_that_the_least_peak_fits_takes_no_more_time(seed):
    graph = with_views(stack(seed, layers=16), seed)
    least = ogc.solve(graph, memory_budget="least")
    for more in (1.0, 1.02):
        plan = ogc.solve(graph, memory_budget=int(more * least.peak_bytes))
        assert plan.recomputed_seconds <= least.recomputed_seconds


@pytest.mark.full
def test_more_time_than_the_least_peak_takes_buys_the_least_peak(few_cuts):
    graph = stack(1, layers=16)
    least = ogc.solve(graph, memory_budget="least")
    assert ogc.solve(graph, max_overhead=1.01 * least.overhead).peak_bytes == least.peak_bytes


@pytest.mark.full
@pytest.mark.parametrize("few", [80, 10**9])
def test_so_it_does_between_all_cuts_and_beside_views(few, monkeypatch):
    monkeypatch.setattr(search, "FEW_CUTS", few)
    graph = with_views(stack(1, layers=16), seed=1)
    least = ogc.solve(graph, memory_budget="least")
    assert ogc.solve(graph, max_overhead=1.01 * least.overhead).peak_bytes == least.peak_bytes


def test_no_time_at_all_is_the_plain_model(few_cuts):
    assert ogc.solve(stack(0, layers=16), max_overhead=0.0).recomputed_seconds == 0

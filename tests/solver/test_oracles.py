"""The optimum, brute force and exact search, one in the place of the other."""

import random

import pytest
from helpers import chain, random_graph
from oracles import ORACLES, every_flat_plan, every_tree

from ogc.errors import InputError, SolveError
from ogc.plan.simulate import lower_bound
from ogc.solver import LEAST_PEAK, SOLVERS, Goal

ALL = {"optimal": SOLVERS["optimal"], **ORACLES}
OF_CHAINS = [name for name in ALL if name != "every flat plan"]
"""Those that know the least peak of a chain: it may take several levels."""


def small_chain(seed):
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(rng.randint(2, 5))]
    return chain(sizes, backward_bytes=rng.randrange(8), gradient_bytes=rng.randrange(4))


@pytest.mark.parametrize("solver", OF_CHAINS)
@pytest.mark.parametrize("seed", range(15))
def test_all_agree_on_chains(seed, solver):
    graph = small_chain(seed)
    assert ALL[solver](graph, LEAST_PEAK).peak_bytes == every_tree(graph, LEAST_PEAK).peak_bytes


@pytest.mark.full
@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("seed", range(15))
def test_the_least_peak_is_a_budget_that_is_met_and_a_byte_less_is_refused(seed, solver):
    graph = small_chain(seed) if seed % 2 else random_graph(seed, most=5)
    least = ALL[solver](graph, LEAST_PEAK).peak_bytes
    assert lower_bound(graph) <= least
    if least > 1:  # no budget is less than a byte
        assert ALL[solver](graph, Goal(memory_budget=least)).peak_bytes == least
        with pytest.raises(SolveError):
            ALL[solver](graph, Goal(memory_budget=least - 1))


@pytest.mark.full
@pytest.mark.parametrize("brute_force", [every_flat_plan, every_tree])
@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_is_no_worse_than_brute_force(seed, brute_force):
    graph = small_chain(seed) if brute_force is every_tree else random_graph(seed, most=7)
    least, most = brute_force(graph, LEAST_PEAK), ALL["optimal"](graph, LEAST_PEAK).plain_peak_bytes
    assert ALL["optimal"](graph, LEAST_PEAK).peak_bytes <= least.peak_bytes
    for budget in {max(1, least.peak_bytes + (most - least.peak_bytes) * n // 4) for n in range(5)}:
        ours, theirs = (solve(graph, Goal(memory_budget=budget)) for solve in (ALL["optimal"], brute_force))
        assert ours.peak_bytes <= budget
        assert ours.recomputed_seconds <= theirs.recomputed_seconds * (1 + 1e-12)


@pytest.mark.parametrize(("solver", "peaks"), [("every flat plan", [31, 23, 18, 18]), ("every tree", [31, 23, 16, 16])])
def test_time_is_bounded_as_asked(solver, peaks):
    """Of a chain whose two levels pay: one of them, and the optimum as far as brute force goes."""
    graph, shares = chain([5, 8, 3, 13, 2]), (0.0, 0.1, 0.3, 10.0)
    assert [ALL[solver](graph, Goal(max_overhead=share)).peak_bytes for share in shares] == peaks
    assert all(ALL["optimal"](graph, Goal(max_overhead=s)).peak_bytes <= p for s, p in zip(shares, peaks, strict=True))


@pytest.mark.parametrize("solver", ["constraint program", "search over states"])
def test_exact_schedules_are_not_asked_for_time(solver):
    with pytest.raises(InputError, match="time of an exact schedule"):
        ORACLES[solver](chain([1, 2]), Goal(max_overhead=0.1))

"""The exact oracle, by hand and against a search."""

import random

import pytest
from exact import Step, least_peak, offered, replay, steps_of
from exact_search import searched_peak
from helpers import chain, random_graph, random_tree

from ogc.solver.simulate import simulate


def random_chain(seed, most):
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(rng.randint(2, most))]
    return chain(sizes, backward_bytes=rng.randrange(8), gradient_bytes=rng.randrange(4))


def test_the_optimum_of_a_chain_by_hand():
    assert least_peak(chain([1, 1, 1, 1])) == 3
    # Values 0 and 1 go and come back one after the other; the most is alive when 1 is made from 0 again.
    assert least_peak(chain([5, 7, 9, 11])) == 5 + 7 + 11


def test_what_a_schedule_holds_by_hand():
    steps = [Step("forward", 0), Step("forward", 1), Step("backward", 1), Step("again", 0, 4), Step("backward", 0)]
    assert replay(chain([5, 7]), steps) == 5 + 7 + 4
    with pytest.raises(ValueError, match="needed before any step makes it"):
        replay(chain([5, 7]), [Step("forward", 1), Step("backward", 1)])


def test_the_steps_on_offer():
    steps = [(step.phase, step.operation) for step in offered(chain([1, 1]), passes=1, in_forward=True)]
    forward, backward = [("forward", 0), ("again", 0), ("forward", 1)], [("backward", 1), ("again", 0), ("backward", 0)]
    assert steps == [*forward, ("again", 0), ("again", 1), *backward]


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_program_agrees_with_a_search_over_states(seed, in_forward):
    for graph in (random_chain(seed, most=5), random_graph(seed, most=6)):
        assert least_peak(graph, in_forward=in_forward) == searched_peak(graph, in_forward)


@pytest.mark.parametrize("seed", range(30))
def test_a_schedule_holds_what_the_simulator_says_in_a_chain(seed):
    graph = random_chain(seed, most=12)
    tree = random_tree(graph.cuts, random.Random(seed))
    assert replay(graph, steps_of(graph, tree)) == simulate(graph, tree).peak_bytes

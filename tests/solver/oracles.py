"""Brute force and exact search as solvers: on small graphs, what the optimum is asked can be asked of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from exact import least_peak
from exact_search import searched_peak
from interval_oracle import all_flat_plans

from ogc.errors import InputError, SolveError
from ogc.graph import Graph
from ogc.plan import Segment, recomputed, saved, simulate
from ogc.solver import Goal


class Found(NamedTuple):
    """What an oracle says of the best there is; exact schedules are no plans, so that there is no more to say."""

    peak_bytes: int
    recomputed_seconds: float = float("nan")


Oracle = Callable[[Graph, Goal], Found]
"""The signature of a solver.

Raises:
    InputError: this one cannot be asked for that.
    SolveError: nothing fits the budget.
"""


def every_flat_plan(graph: Graph, goal: Goal) -> Found:
    """The best plan of one level, by the rule that cuts keep their boundary."""
    return _best(_flat_plans(graph), graph, goal)


def every_tree(graph: Graph, goal: Goal) -> Found:
    """The best tree of segments, by the simulator."""
    return _best(_all_trees(graph), graph, goal)


@lru_cache(maxsize=4)  # of one graph several goals are asked, one after the other
def _flat_plans(graph: Graph) -> tuple[Found, ...]:
    return tuple(itertools.starmap(Found, all_flat_plans(graph)))


@lru_cache(maxsize=4)
def _all_trees(graph: Graph) -> tuple[Found, ...]:
    costs = (simulate(graph, tree) for tree in _different_trees(graph.cuts))
    return tuple(Found(cost.peak_bytes, cost.recomputed_seconds) for cost in costs)


def _exact(peak_of: Callable[[Graph], int], graph: Graph, goal: Goal) -> Found:
    """The best schedule of all."""
    if goal.max_overhead is not None:
        raise InputError("the time of an exact schedule is not known")
    return _best([Found(peak_of(graph))], graph, goal)


ORACLES: dict[str, Oracle] = {
    "every flat plan": every_flat_plan,
    "every tree": every_tree,
    "constraint program": partial(_exact, lru_cache(maxsize=4)(least_peak)),
    "search over states": partial(_exact, lru_cache(maxsize=4)(searched_peak)),
}


def _best(found: Iterable[Found], graph: Graph, goal: Goal) -> Found:
    found = list(found)
    if goal.max_overhead is not None:
        found = [f for f in found if f.recomputed_seconds <= goal.max_overhead * graph.step_seconds]
    budget = goal.budget_bytes(int(simulate(graph, [saved(0, len(graph))]).peak_bytes))
    if budget is None:
        return min(found)
    fitting = [f for f in found if f.peak_bytes <= budget]
    if not fitting:
        raise SolveError(f"nothing peaks at or below {budget} bytes")
    return min(fitting, key=lambda f: (f.recomputed_seconds, f.peak_bytes))


@lru_cache(maxsize=16)
def _different_trees(cuts: tuple[int, ...]) -> tuple[tuple[Segment, ...], ...]:
    """Each once: two thirds of all are found by several ways."""
    return tuple(dict.fromkeys(_trees(cuts)))


def _trees(cuts: Sequence[int]) -> Iterator[tuple[Segment, ...]]:
    """Every plan over ``cuts``: all ways to divide, each piece saved or recomputed in every way."""
    inner = cuts[1:-1]
    for count in range(len(inner) + 1):
        for chosen in itertools.combinations(inner, count):
            edges = [cuts[0], *chosen, cuts[-1]]
            pieces = [_pieces(tuple(c for c in cuts if a <= c <= b)) for a, b in pairwise(edges)]
            yield from itertools.product(*pieces)


def _pieces(cuts: Sequence[int]) -> Iterator[Segment]:
    yield saved(cuts[0], cuts[-1])
    yield recomputed(cuts[0], cuts[-1])
    for k in range(1, len(cuts) - 1):
        for first in _pieces(cuts[: k + 1]):
            for rest in _pieces(cuts[k:]):
                # What is run again is not forgotten at once: its last part is kept.
                parts = (first, *rest.parts) if rest.parts else (first, rest)
                yield recomputed(cuts[0], cuts[-1], *parts)

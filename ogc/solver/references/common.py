"""From ways to cut a program to a solver like any other, and the cuts that several of them try."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import isqrt

import numpy as np

from ...errors import PlanError
from ...graph import Graph
from ...plan import Decisions, Plan, Segment, make_plan, plain_plan, saved, simulate
from ...plan.decisions import cut_into_segments
from ...plan.schedule import Schedule
from ..wish import Solver, Wish

MAX_TRIES = 64
"""Plans that a solver chooses from at most: each is simulated, and more would differ little."""

Idea = Callable[[Graph], Iterable[Sequence[Segment]]]
"""The plans that a published method offers for a graph of at least one operation, each as segments that cover it."""


def reference(name: str) -> Callable[[Idea], Solver]:
    """A solver that takes the plan with the least simulated peak, then the least recomputed time, of what is offered.

    What must not be run again is saved instead (:func:`without_forbidden`). Wishes are not looked at:
    :func:`ogc.solver.solver_of` refuses them.
    """

    def solver_of(idea: Idea) -> Solver:
        @wraps(idea)
        def solver(graph: Graph, wish: Wish) -> Plan:
            if not len(graph):
                return plain_plan(graph)

            def cost(decisions: Decisions) -> tuple[int, float]:
                found = simulate(graph, decisions)
                return found.peak_bytes, found.recomputed_seconds

            plans = (Decisions(without_forbidden(graph, segments)) for segments in idea(graph))
            return make_plan(graph, min(plans, key=cost), name)

        return solver

    return solver_of


def without_forbidden(graph: Graph, segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The segments, with the parts of a recomputed one in its place where it must not be run again."""
    found: list[Segment] = []
    for segment in segments:
        if segment.parts and not _may_run_again(graph, segment):
            found += without_forbidden(graph, segment.parts)
        else:
            found.append(segment)
    return tuple(found)


def _may_run_again(graph: Graph, segment: Segment) -> bool:
    if all(op.replayable for op in graph.operations[segment.start : segment.stop]):
        return True
    around = (saved(0, segment.start), segment, saved(segment.stop, len(graph)))
    try:
        Schedule(graph, Decisions(tuple(s for s in around if s.start < s.stop)))
    except PlanError:
        return False
    return True


def all_but_last(cuts: Sequence[int]) -> tuple[Segment, ...]:
    """Segments between ``cuts``, all but the last run again; its backward comes right after its forward."""
    return cut_into_segments(cuts, [stop < cuts[-1] for stop in cuts[1:]])


def counts(most: int) -> list[int]:
    """Numbers from 1 to ``most``: all if they are few, else evenly spaced in ratio."""
    if most <= MAX_TRIES:
        return list(range(1, most + 1))
    return np.unique(np.geomspace(1, most, MAX_TRIES).astype(int)).tolist()


def segment_counts(graph: Graph) -> list[int]:
    return counts(min(len(graph), isqrt(16 * len(graph))))


def at_cuts(graph: Graph, indices: Iterable[int]) -> tuple[int, ...]:
    """The cuts of these numbers, with both ends of the program."""
    return tuple(sorted({0, len(graph), *(graph.cuts[index] for index in indices)}))

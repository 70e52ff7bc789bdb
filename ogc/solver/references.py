"""Solvers to compare with: what is published or in common use, verified by the same simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from math import comb, isqrt

import numpy as np

from ..errors import PlanError
from ..graph import Graph
from ..plan import Decisions, Plan, Segment, plain_plan, recomputed, saved
from ..plan.decisions import cut_into_segments
from ..plan.fast import Replay
from ..plan.schedule import Schedule
from .candidates import weigh
from .goal import Goal, Solver
from .levels import MOST_TIMES

MAX_TRIES = 64
"""Plans that a solver chooses from at most: each is simulated, and more would differ little."""

REFERENCES: dict[str, Solver] = {}
"""Reference solvers by the names that :func:`ogc.solve` takes."""

Method = Callable[[Graph], Iterable[Sequence[Segment]]]
"""The plans that a published method offers for a graph of at least one operation, each as segments that cover it."""


def reference(name: str) -> Callable[[Method], Solver]:
    """Enter a method as a solver, which takes the plan with the least simulated peak, then the least recomputed time.

    What must not be recomputed is saved instead (:func:`without_forbidden`).
    """

    def solver_of(method: Method) -> Solver:
        @wraps(method)
        def solver(graph: Graph, goal: Goal) -> Plan:
            if not len(graph):
                return plain_plan(graph)
            costs = Replay(graph)
            plans = (weigh(costs, Decisions(without_forbidden(graph, segments))) for segments in method(graph))
            best = min(plans, key=lambda plan: (plan.peak_bytes, plan.seconds))
            return plain_plan(graph).deciding(best.decisions, name)

        REFERENCES[name] = solver
        return solver

    return solver_of


@reference("chen")
def chen(graph: Graph) -> Iterator[Sequence[Segment]]:
    """About sqrt(n) segments of about equal bytes.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, algorithm 3. For a budget of b bytes,
    the program is cut as soon as more than b bytes were made since the last cut. Budgets here are 1/k of all bytes for
    k up to 4 sqrt(n), of which the least sum of kept bytes and largest segment is taken. O(n^1.5 log n).
    """
    made = np.zeros(len(graph) + 1, np.int64)
    sizes = np.array([v.bytes for v in graph.values], np.int64)
    np.add.at(made, np.array(graph.producers, np.int64) + 1, sizes)
    made = np.cumsum(made)[list(graph.cuts)]  # before each cut

    def objective(cuts: Sequence[int]) -> int:
        """Bytes of what crosses a cut, each value once, and of all that the largest segment makes."""
        first, last = (np.searchsorted(cuts[1:-1], ends, "right") for ends in (graph.producers, graph.last_uses))
        return int(sizes[last > first].sum() + np.diff(made[np.searchsorted(graph.cuts, cuts)]).max())

    plans = (at_cuts(graph, _cuts_by_bytes(made, count)) for count in _segment_counts(graph))
    yield all_but_last(min(plans, key=objective))


def _cuts_by_bytes(made: np.ndarray, count: int) -> list[int]:
    """Each segment ends at the first cut by which it makes more than 1 / ``count`` of all bytes."""
    chosen = [0]
    while chosen[-1] < len(made) - 1:
        end = int(np.searchsorted(made, made[chosen[-1]] + made[-1] / count, side="right"))
        chosen.append(min(end, len(made) - 1))
    return chosen


@reference("uniform")
def uniform(graph: Graph) -> Iterator[Sequence[Segment]]:
    """The best number of segments with about equally many operations, as in ``checkpoint_sequential``.

    Objective: simulated peak, then recomputed time, over the numbers up to 4 sqrt(n). O(n) per number.
    Equal parts end at the nearest cuts.
    """
    ends = (len(graph) * np.arange(1, count) / count for count in _segment_counts(graph))
    nearest = (np.abs(end[:, None] - np.array(graph.cuts)).argmin(1).tolist() for end in ends)
    return map(all_but_last, dict.fromkeys(at_cuts(graph, indices) for indices in nearest))


@reference("binomial")
def binomial(graph: Graph) -> Iterator[Sequence[Segment]]:
    """Nested segments that are optimal for a chain of equal steps; the steps here lie between cuts.

    Source: Griewank & Walther, "Algorithm 799: revolve", 2000. With s snapshots, l <= C(s + r, s) steps are each
    recomputed r times at most, and as rarely as possible in all. Here s is chosen by the simulated peak, then the
    recomputed time, from where r is ``MOST_TIMES`` to where it is 2. O(l r) for a plan, and its simulation.
    """
    steps = len(graph.cuts) - 1
    few_enough = (s for s in _counts(isqrt(2 * steps) + 1) if _repetitions(steps, s) <= MOST_TIMES)
    return (revolve(graph.cuts, s) for s in few_enough)


def _repetitions(steps: int, snapshots: int) -> int:
    """The least r such that ``snapshots`` are enough to recompute no step more than r times."""
    return next(r for r in range(steps) if comb(snapshots + r, snapshots) >= steps)


def revolve(cuts: Sequence[int], snapshots: int) -> tuple[Segment, ...]:
    """Segments between ``cuts`` by the binomial rule; the state at the first of them is one of the snapshots."""
    steps = len(cuts) - 1
    if steps == 1:
        return (saved(cuts[0], cuts[1]),)
    r = _repetitions(steps, snapshots)
    first = min(comb(snapshots + r - 1, snapshots), steps - comb(snapshots + r - 2, snapshots - 1))
    before = recomputed(cuts[0], cuts[first], *revolve(cuts[: first + 1], snapshots))
    return (before, *revolve(cuts[first:], snapshots - 1))


@reference("feng-huang")
def feng_huang(graph: Graph) -> Iterator[Sequence[Segment]]:
    """The published algorithm for arbitrary graphs; see :mod:`ogc.solver.feng_huang`.

    The program is cut at each of its checkpoints, or at the next cut. For vertices that split the whole graph this is
    exact; elsewhere a cut keeps all that crosses it, and branches are run in program order.
    """
    from .feng_huang import checkpoint_positions  # which needs networkx, as nothing else that plans does

    yield all_but_last(at_cuts(graph, np.searchsorted(graph.cuts, checkpoint_positions(graph)).tolist()))


def without_forbidden(graph: Graph, segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The segments, with the parts of a recomputed one in its place where it must not be recomputed."""
    found: list[Segment] = []
    for segment in segments:
        if segment.parts and not _may_be_recomputed(graph, segment):
            found += without_forbidden(graph, segment.parts)
        else:
            found.append(segment)
    return tuple(found)


def _may_be_recomputed(graph: Graph, segment: Segment) -> bool:
    if all(op.replayable for op in graph.operations[segment.start : segment.stop]):
        return True
    around = (saved(0, segment.start), segment, saved(segment.stop, len(graph)))
    try:
        Schedule(graph, Decisions(tuple(s for s in around if s.start < s.stop)))
    except PlanError:
        return False
    return True


def all_but_last(cuts: Sequence[int]) -> tuple[Segment, ...]:
    """Segments between ``cuts``, all but the last recomputed: its backward comes right after its forward."""
    return cut_into_segments(cuts, [stop < cuts[-1] for stop in cuts[1:]])


def _counts(most: int) -> list[int]:
    """Numbers from 1 to ``most``: all if they are few, else evenly spaced in ratio."""
    if most <= MAX_TRIES:
        return list(range(1, most + 1))
    return np.unique(np.geomspace(1, most, MAX_TRIES).astype(int)).tolist()


def _segment_counts(graph: Graph) -> list[int]:
    return _counts(min(len(graph), isqrt(16 * len(graph))))


def at_cuts(graph: Graph, indices: Iterable[int]) -> tuple[int, ...]:
    """The cuts of these numbers, with both ends of the program."""
    return tuple(sorted({0, len(graph), *(graph.cuts[index] for index in indices)}))

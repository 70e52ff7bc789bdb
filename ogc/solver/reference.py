"""Solvers to compare with: what is published or in common use, judged by the same simulator.

Each takes a graph of at least one operation and returns segments that cover it. What must not be run again is
saved instead (:func:`without_forbidden`). Gradients, temporaries and what an operation really saves are
known to none of them, except that ``uniform`` and ``binomial`` ask the simulator which of their plans to take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import comb, isqrt

import numpy as np

from ..errors import PlanError
from ..graph import Graph
from ..plan.decisions import Decisions, Segment, cut_into_segments, recomputed, saved
from ..plan.schedule import Schedule
from ..plan.simulate import simulate
from .division import checkpoint_places
from .nested import MOST_TIMES

MAX_TRIES = 64
"""Plans that a solver chooses from at most."""


def chen(graph: Graph) -> tuple[Segment, ...]:
    """About sqrt(n) segments of about equal bytes.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, algorithm 3. For a budget of
    b bytes, the program is cut as soon as more than b bytes were made since the last cut. The paper tries
    budgets around the geometric mean of the largest segment and the bytes kept; here they are 1/k of all
    bytes for k up to 4 sqrt(n), and the least sum of the two is taken. A cut keeps all that crosses it, on
    a chain the paper's one tensor. O(n^1.5 log n).
    """
    plans = [_cuts_by_bytes(graph, count) for count in _segment_counts(graph)]
    return without_forbidden(graph, _all_but_last(min(plans, key=lambda cuts: _chen_bytes(graph, cuts))))


def uniform(graph: Graph) -> tuple[Segment, ...]:
    """The best number of segments with about equally many operations, as in ``checkpoint_sequential``.

    Objective: simulated peak, then recomputed time, over the numbers up to 4 sqrt(n). O(n) per number.
    """
    plans = dict.fromkeys(_cuts_by_count(graph, count) for count in _segment_counts(graph))
    return _best(graph, map(_all_but_last, plans))


def binomial(graph: Graph) -> tuple[Segment, ...]:
    """Nested segments that are optimal for a chain of equal steps; the steps here lie between cuts.

    Source: Griewank & Walther, "Algorithm 799: revolve", 2000. With s snapshots, l <= C(s + r, s) steps are
    each run again r times at most, and as rarely as possible in all. Here s is chosen by the simulated peak,
    then the recomputed time, from where r is ``MOST_TIMES``, as for our own plans, to where it is 2. O(l r)
    for a plan, and its simulation.
    """
    steps = len(graph.cuts) - 1
    counts = [s for s in _counts(isqrt(2 * steps) + 1) if _repetitions(steps, s) <= MOST_TIMES]
    return _best(graph, (_revolve(graph.cuts, s) for s in counts))


def feng_huang(graph: Graph) -> tuple[Segment, ...]:
    """The published algorithm for arbitrary graphs; source, objective and complexity: :mod:`ogc.solver.division`.

    The program is cut at each of its checkpoints, or behind it where it may first be cut. For vertices that
    split the whole graph this is exact. Elsewhere a cut keeps all that crosses it, not the checkpoint alone,
    and branches that the algorithm looks at one by one are run in program order.
    """
    indices = np.searchsorted(graph.cuts, checkpoint_places(graph))
    return without_forbidden(graph, _all_but_last(_at_cuts(graph, indices.tolist())))


REFERENCES: dict[str, Callable[[Graph], tuple[Segment, ...]]] = {
    "chen": chen,
    "uniform": uniform,
    "binomial": binomial,
    "feng-huang": feng_huang,
}
"""By the names that :func:`ogc.solve` takes."""


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


def _best(graph: Graph, plans: Iterable[tuple[Segment, ...]]) -> tuple[Segment, ...]:
    """The plan with the least simulated peak, then the least recomputed time."""

    def cost(segments: tuple[Segment, ...]) -> tuple[int, float]:
        found = simulate(graph, segments)
        return found.peak_bytes, found.recomputed_seconds

    return min((without_forbidden(graph, plan) for plan in plans), key=cost)


def _all_but_last(cuts: Sequence[int]) -> tuple[Segment, ...]:
    """Segments between ``cuts``, all but the last run again; its backward comes right after its forward."""
    return cut_into_segments(cuts, [stop < cuts[-1] for stop in cuts[1:]])


def _counts(most: int) -> list[int]:
    """Numbers from 1 to ``most``: all if they are few, else evenly spaced in ratio."""
    if most <= MAX_TRIES:
        return list(range(1, most + 1))
    return np.unique(np.geomspace(1, most, MAX_TRIES).astype(int)).tolist()


def _segment_counts(graph: Graph) -> list[int]:
    return _counts(min(len(graph), isqrt(16 * len(graph))))


def _at_cuts(graph: Graph, indices: Iterable[int]) -> tuple[int, ...]:
    """The cuts of these numbers, with both ends of the program."""
    return tuple(sorted({0, len(graph), *(graph.cuts[index] for index in indices)}))


def _cuts_by_count(graph: Graph, count: int) -> tuple[int, ...]:
    """Where equal parts would end, or the nearest cuts to there."""
    places = len(graph) * np.arange(1, count) / count
    return _at_cuts(graph, np.abs(places[:, None] - np.array(graph.cuts)).argmin(1).tolist())


def _cuts_by_bytes(graph: Graph, count: int) -> tuple[int, ...]:
    """Each segment ends at the first cut by which it makes more than 1 / ``count`` of all bytes."""
    made = _made_before_cuts(graph)
    chosen = [0]
    while chosen[-1] < len(made) - 1:
        place = int(np.searchsorted(made, made[chosen[-1]] + made[-1] / count, side="right"))
        chosen.append(min(place, len(made) - 1))
    return _at_cuts(graph, chosen)


def _made_before_cuts(graph: Graph) -> np.ndarray:
    """Bytes of the values made before each cut."""
    made = np.zeros(len(graph) + 1, np.int64)
    np.add.at(made, np.array(graph.producers, np.int64) + 1, np.array([v.bytes for v in graph.values], np.int64))
    return np.cumsum(made)[list(graph.cuts)]


def _chen_bytes(graph: Graph, cuts: Sequence[int]) -> int:
    """Bytes of what crosses a cut, each value once, and of all that the largest segment makes."""
    inner = cuts[1:-1]
    sizes = np.array([v.bytes for v in graph.values], np.int64)
    crosses = np.searchsorted(inner, graph.last_uses, "right") > np.searchsorted(inner, graph.producers, "right")
    made = _made_before_cuts(graph)[np.searchsorted(graph.cuts, cuts)]
    return int(sizes[crosses].sum() + np.diff(made).max())


def _repetitions(steps: int, snapshots: int) -> int:
    """The least r such that ``snapshots`` are enough to run no step again more than r times."""
    return next(r for r in range(steps) if comb(snapshots + r, snapshots) >= steps)


def _revolve(cuts: Sequence[int], snapshots: int) -> tuple[Segment, ...]:
    """Segments between ``cuts`` by the binomial rule; the state at the first of them is one of the snapshots."""
    steps = len(cuts) - 1
    if steps == 1:
        return (saved(cuts[0], cuts[1]),)
    r = _repetitions(steps, snapshots)
    first = min(comb(snapshots + r - 1, snapshots), steps - comb(snapshots + r - 2, snapshots - 1))
    before = recomputed(cuts[0], cuts[first], *_revolve(cuts[: first + 1], snapshots))
    return (before, *_revolve(cuts[first:], snapshots - 1))

"""Segments of about equal bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...graph import Graph
from ...plan import Segment
from .common import all_but_last, at_cuts, reference, segment_counts


@reference("chen")
def chen(graph: Graph) -> Iterable[Sequence[Segment]]:
    """About sqrt(n) segments of about equal bytes.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, algorithm 3. For a budget of
    b bytes, the program is cut as soon as more than b bytes were made since the last cut. The paper tries
    budgets around the geometric mean of the largest segment and the bytes kept; here they are 1/k of all
    bytes for k up to 4 sqrt(n), and the least sum of the two is taken. A cut keeps all that crosses it, on
    a chain the paper's one tensor. O(n^1.5 log n).
    """
    plans = [_cuts_by_bytes(graph, count) for count in segment_counts(graph)]
    yield all_but_last(min(plans, key=lambda cuts: _chen_bytes(graph, cuts)))


def _cuts_by_bytes(graph: Graph, count: int) -> tuple[int, ...]:
    """Each segment ends at the first cut by which it makes more than 1 / ``count`` of all bytes."""
    made = _made_before_cuts(graph)
    chosen = [0]
    while chosen[-1] < len(made) - 1:
        place = int(np.searchsorted(made, made[chosen[-1]] + made[-1] / count, side="right"))
        chosen.append(min(place, len(made) - 1))
    return at_cuts(graph, chosen)


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

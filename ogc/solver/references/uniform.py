"""Segments of about equally many operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...graph import Graph
from ...plan import Segment
from .common import all_but_last, at_cuts, reference, segment_counts


@reference("uniform")
def uniform(graph: Graph) -> Iterable[Sequence[Segment]]:
    """The best number of segments with about equally many operations, as in ``checkpoint_sequential``.

    Objective: simulated peak, then recomputed time, over the numbers up to 4 sqrt(n). O(n) per number.
    """
    plans = dict.fromkeys(_cuts_by_count(graph, count) for count in segment_counts(graph))
    return map(all_but_last, plans)


def _cuts_by_count(graph: Graph, count: int) -> tuple[int, ...]:
    """Where equal parts would end, or the nearest cuts to there."""
    places = len(graph) * np.arange(1, count) / count
    return at_cuts(graph, np.abs(places[:, None] - np.array(graph.cuts)).argmin(1).tolist())

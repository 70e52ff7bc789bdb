"""Which values a segment may keep although it is run again: those whose making costs most time for their bytes.

In a convolutional network that is what convolutions make, in a transformer what matrix products make; normalisation,
activations and sums are run again. One threshold (seconds per byte) for all values, as in selective activation
checkpointing, but which segments keep, and at which of a few thresholds, is left to the search.
"""

from __future__ import annotations

import numpy as np

from ..graph import Graph

SHARES = (0.3, 0.5, 0.7, 0.85, 0.95)
"""How much of the program's time the values make up that may be kept, at each threshold."""


def worth_keeping(graph: Graph) -> list[frozenset[int]]:
    """A set of values for each threshold, from the highest to the lowest, without those that are the same."""
    seconds = np.zeros(len(graph.values))
    useful = np.array([v.bytes > 0 and not v.is_output for v in graph.values], bool)
    useful &= np.array(graph.first_savers, np.int64) < len(graph)
    for t, op in enumerate(graph.operations):
        for v in op.writes:
            seconds[v] += graph.repeat_seconds[t]
            useful[v] &= not op.internal_bytes or graph.keeps_internals[t]
    candidates = np.flatnonzero(useful & (seconds > 0))
    candidates = candidates[
        np.argsort(-seconds[candidates] / [graph.values[v].bytes for v in candidates], kind="stable")
    ]
    share = np.cumsum(seconds[candidates]) / sum(graph.repeat_seconds)
    counts = dict.fromkeys(int(np.searchsorted(share, s)) for s in SHARES)
    return [frozenset(int(v) for v in candidates[:count]) for count in counts if count]

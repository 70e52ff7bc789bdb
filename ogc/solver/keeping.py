"""Which values a segment may keep although it is run again: those whose making costs most time for their bytes.

In a convolutional network that is what convolutions make, in a transformer what matrix products make; normalisation,
activations and sums are run again. The bytes are those of the value and of the internal tensors that are kept with
it. One threshold (seconds per byte) for all values, as in selective activation checkpointing, but which segments
keep, and at which of a few thresholds, is left to the search.
"""

from __future__ import annotations

import numpy as np

from ..graph import Graph

SHARES = (0.3, 0.5, 0.7, 0.85, 0.95)
"""How much of the program's time the values make up that may be kept, at each threshold."""


def worth_keeping(graph: Graph) -> list[frozenset[int]]:
    """A set of values for each threshold, from the highest to the lowest, without those that are the same."""
    seconds = np.zeros(len(graph.values))
    size = np.array([0 if v.is_output else v.bytes for v in graph.values], np.int64)
    internal = np.zeros(len(size), np.int64)
    for op, again, stays in zip(graph.operations, graph.repeat_seconds, graph.keeps_internals, strict=True):
        for v in op.writes:
            seconds[v] += again
            internal[v] += 0 if stays else op.internal_bytes
    candidates = np.flatnonzero((size > 0) & (seconds > 0))
    worth = seconds[candidates] / (size + internal)[candidates]
    candidates = candidates[np.argsort(-worth, kind="stable")]
    share = np.cumsum(seconds[candidates]) / sum(graph.repeat_seconds)
    counts = dict.fromkeys(int(np.searchsorted(share, s)) for s in SHARES)
    return [frozenset(int(v) for v in candidates[:count]) for count in counts if count]

"""Values that a segment may keep although it is run again: those whose making costs most time for their bytes.

In a convolutional network that is what convolutions make, in a transformer what matrix products make; normalisation,
activations and sums are run again. The bytes are those of the value and of the internal tensors that are kept with
it. One threshold (seconds per byte) for all values, as in selective activation checkpointing, but which segments
keep, and at which of a few thresholds, is left to the search. One of them lies where the seconds per byte fall most:
between the products and everything else, if that is how they differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph import Graph

SHARES = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Shares of the program's time that the values which may be kept make up, one for each threshold but that of the fall.
A few, as each is one more mode of every segment."""


def worth_keeping(graph: Graph, shares: Sequence[float] = SHARES) -> list[frozenset[int]]:
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
    order = np.argsort(-worth, kind="stable")
    candidates, worth = candidates[order], worth[order]
    share = np.cumsum(seconds[candidates]) / sum(graph.repeat_seconds)
    counts = {int(np.searchsorted(share, s)) for s in shares}
    half = 1 + int(np.searchsorted(share, 0.5))
    falls = worth[half - 1 : -1] / worth[half:]
    if len(falls):
        counts.add(half + int(np.argmax(falls)))
    return [frozenset(int(v) for v in candidates[:count]) for count in sorted(counts) if count]

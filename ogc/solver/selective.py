"""Selective checkpointing: a segment that is run again keeps what costs most time to make for its bytes.

That is what convolutions and matrix products make; normalisation, activations and sums are run again. Bytes are those
of the value and of the internal tensors that are kept with it. A threshold in seconds per byte holds for all values;
which segments keep, and at which of a few thresholds, is left to the search. One of them lies where the seconds per
byte fall most: between the products and everything else, if that is how they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np

from ..errors import PlanError
from ..graph import Graph
from ..plan import Decisions, recomputed
from .local_search import Candidate, weigh

SHARES = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Shares of the program's time that the values which may be kept make up, one for each threshold but that of the fall.
A few, as each is one more mode of every segment."""

SELECTIVE_SHARES = tuple(1 - np.geomspace(0.7, 0.005, 12))
"""Shares of the program's time that the values kept by selective plans make up; closer where little is made again."""

PARTS = 200
"""Segments of a selective plan at most: each looks at what comes before it."""

SELECTING = 10_000
"""Operations up to which selective plans are tried: each takes a simulation of as many runs as it has segments."""


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


def selective(graph: Graph) -> Iterator[Candidate]:
    """Plans that keep what is worth it by one threshold and make everything else again wherever it is used.

    The tables only let go of what does not cross a cut. Where much costs next to nothing to make, as when time is
    counted in FLOPs, that holds more than these plans do.
    """
    if len(graph) > SELECTING:
        return
    cuts = graph.cuts[: -1 : -(-len(graph.cuts) // PARTS)] + graph.cuts[-1:]
    for kept in worth_keeping(graph, SELECTIVE_SHARES):
        by_place = sorted(kept, key=graph.producers.__getitem__)
        edges = np.searchsorted([graph.producers[v] for v in by_place], cuts)
        segments = tuple(
            recomputed(start, stop, kept=by_place[first:last])
            for (start, stop), (first, last) in zip(pairwise(cuts), pairwise(edges), strict=True)
        )
        remade = (v for v, value in enumerate(graph.values) if not value.is_output and v not in kept)
        with suppress(PlanError):  # an operation would run twice that must not
            yield weigh(graph, Decisions(segments).remaking(remade))

"""A program as arrays over its operations, values and cuts, and the sums that weights of stretches are made of.

A value contributes where its producer lies on one side of a cut and its last use, first use or first saver on the
other: a rectangle of pairs of cuts. No sum loops over pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...graph import Graph

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = np.iinfo(np.int64).max // 4
"""Bytes that no plan may have: marks the impossible; a sum of two does not overflow."""

Rectangles = tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike, Ints]
"""Rows from and to, columns from and to, and a weight, for every value."""


class ProgramArrays:
    """The graph between ``cuts``, all of its own unless they are given.

    ``t`` ranges over operations, ``v`` over values, ``i`` and ``j`` over cuts.
    """

    def __init__(self, graph: Graph, cuts: Sequence[int] | None = None) -> None:
        cuts = graph.cuts if cuts is None else cuts
        ops = graph.operations
        self.graph = graph
        self.n = len(graph)
        self.cuts = np.array(cuts, np.int64)
        self.later = np.triu(np.ones((len(self.cuts),) * 2, bool), 1)  # [i, j]: j is after i
        self.inside = np.arange(self.n) >= self.cuts[:, None]  # [i, t]: t is at or after cut i

        self.size = np.array([v.bytes for v in graph.values], np.int64)
        self.output = np.array([v.is_output for v in graph.values], bool)
        self.saved = np.array(graph.first_savers, np.int64) < self.n
        self.producer = np.array(graph.producers, np.int64)
        self.last_use = np.array(graph.last_uses, np.int64)
        self.taken_over = np.zeros(len(graph.values), np.int64)
        self.taken_over[[op.takes_over for op in ops if op.takes_over is not None]] = 1
        self.saver = np.array(graph.first_savers, np.int64)
        # The first cut after a position: "before cut j" is j >= after, "at or after cut i" is i < after.
        self.made = self._after(self.producer)
        self.behind = self._after(np.arange(self.n))
        self.first_used = self._after(np.array(graph.first_uses, np.int64))
        self.passes = ~self.output & (np.array(graph.first_uses) < self.n)  # used, and not for good
        self.last_used = self._after(self.last_use)
        # Whether an operation reads what is written again behind it, so that it may ask for a writer behind.
        self.rewrites = any(graph.last_writes[v] > t for t, op in enumerate(ops) for v in op.reads)

        self.internal = np.array([op.internal_bytes for op in ops], np.int64)
        self.small = np.array(graph.keeps_internals, bool)
        self.scratch = np.array([op.scratch_bytes for op in ops], np.int64)
        self.gradient = np.array([op.gradient_bytes for op in ops], np.int64)
        self.backward_peak = np.array([op.backward_bytes for op in ops], np.int64)
        self.late_peak = np.array([op.late_bytes for op in ops], np.int64)
        self.seconds = np.array(graph.repeat_seconds)
        seen = prefix(np.array([op.saved_tensors for op in ops], np.int64))[self.cuts]
        # [i, j]: of the runtime, where the operations from cut i to j are one run.
        self.run_seconds = graph.runtime.run + graph.runtime.saved_tensor * np.maximum(0, seen[None, :] - seen[:, None])
        self.replayable = np.array([op.replayable for op in ops], bool)

    def _within(self) -> Bools:
        """[t, j]: whether operation t lies before cut j."""
        return np.arange(self.n)[:, None] < self.cuts

    def _later_outputs(self) -> Ints:
        """Bytes of outputs made at or after each cut: they stay through the backward."""
        c = np.arange(len(self.cuts))[:, None]
        return ((c < self.made) * np.where(self.output, self.size, 0)).sum(1)

    def _internals(self, per_operation: Ints) -> Ints:
        total = prefix(per_operation)[self.cuts]
        return total[None, :] - total[:, None]

    def _from_cut(self, per_operation: NDArray) -> NDArray:
        """[i, j]: sums of [t, j] over the operations at or after cut i."""
        total = np.zeros((self.n + 1, per_operation.shape[1]), np.float64)
        total[:-1] = per_operation
        cumsum_rows(total[::-1])
        return total[self.cuts]

    def _most_until(self, live: Ints) -> Ints:
        """[i, t]: the largest of [i, s] over the operations s from cut i to t; ``live`` is overwritten."""
        np.copyto(live, -NEVER, where=~self.inside)
        return np.maximum.accumulate(live, 1, out=live)

    def _at_ends(self, peaks: Ints) -> Ints:
        """[i, j]: the entry [i, t] of the last operation before cut j."""
        return np.where(self.later, peaks[:, np.maximum(self.cuts - 1, 0)], NEVER)

    def _most_from(self, positions: Ints, weights: Ints) -> Ints:
        """[i, j]: the largest weight of the operations from a position on and before cut j; -NEVER if there is none."""
        most = (np.maximum.accumulate(np.append(-NEVER, weights[:stop][::-1]))[::-1] for stop in self.cuts)
        return np.stack([here[rows] for here, rows in zip(most, positions.T, strict=True)], 1)

    def _sum_ij(self, *rectangles: Rectangles) -> Ints:
        return _cover((len(self.cuts), len(self.cuts)), rectangles)

    def _sum_it(self, *rectangles: Rectangles) -> Ints:
        return _cover((len(self.cuts), self.n), rectangles)

    def _after(self, positions: Ints) -> Ints:
        return np.searchsorted(self.cuts, positions, side="right")


def boundary_bytes(graph: Graph) -> Ints:
    """For each position from 0 to N, the bytes made before it and used at or after it."""
    change = np.zeros(len(graph) + 2, np.int64)
    for value, first, last in zip(graph.values, graph.producers, graph.last_uses, strict=True):
        change[first + 1] += value.bytes
        change[last + 1] -= value.bytes
    return np.cumsum(change)[:-1]


def prefix(weights: Ints) -> Ints:
    """Sums of the weights before each position, length + 1 of them."""
    return np.concatenate([[0], np.cumsum(weights)])


def cumsum_rows(numbers: NDArray) -> None:
    """``numpy.cumsum`` over the first axis in place, several times faster."""
    for before, row in pairwise(numbers):
        row += before


def _cover(shape: tuple[int, int], rectangles: Iterable[Rectangles]) -> Ints:
    """Sum of the weights whose half-open rectangle of rows and columns covers each cell."""
    corners = np.zeros((shape[0] + 1, shape[1] + 1), np.int64)
    for r_from, r_to, c_from, c_to, weights in rectangles:
        rows = [np.broadcast_to(np.minimum(r, shape[0]), weights.shape) for r in (r_from, r_to)]
        columns = [np.broadcast_to(np.minimum(c, shape[1]), weights.shape) for c in (c_from, c_to)]
        inside = np.where((rows[0] < rows[1]) & (columns[0] < columns[1]), weights, 0)
        for sign_r, row in zip((1, -1), rows, strict=True):
            for sign_c, column in zip((1, -1), columns, strict=True):
                cells = row * corners.shape[1] + column  # numpy adds by one index many times faster than by two
                np.add.at(corners.reshape(-1), cells, sign_r * sign_c * inside)
    cumsum_rows(corners)
    np.cumsum(corners, 1, out=corners)
    return corners[: shape[0], : shape[1]]

"""Exact interval plans: the least peak over all segmentations, then the least recomputation at that peak.

Class of plans: cut the program order at allowed positions; each segment is saved (plain autograd) or
recomputed from its checkpoints; every cut keeps its boundary. Objective: the peak that
:func:`ogc.simulate` reports; among plans of equal peak, the recomputed time.

For a threshold P, fewer bytes kept before a cut are never worse for what follows, so with

    K(j) = min over i < j and mode of  K(i) + kept(i, j)   where  K(i) + local(i, j) <= P

K(N) is finite exactly if some plan peaks at or below P. ``kept(i, j)`` is what segment (i, j) adds to the
bytes that outlive the forward, ``local(i, j)`` the most bytes alive in its forward, its recomputation and
its backward, less K(i). Both depend on i and j alone, because a kept value is released by position: after
the segment with its first use has run again, or after the backward of its first saver. Bisection over P
gives the optimum; a second pass carries the Pareto front of (bytes kept, time recomputed) at each cut.

Complexity, for N operations and C cuts: O(C² N) simple array steps for ``local``, O(C² log bytes) for the
bisection, O(C² F) for fronts of at most F = ``MAX_LABELS`` / C labels. The first pass is exact. The second
is exact as long as no front exceeds F; beyond that it keeps F labels spread over the front, so that the
plan still fits but may recompute a little more than the least.

This extends the linear case of Feng & Huang, CVPR 2021, section 3 (checkpoints minimising the kept bytes
plus the largest interior) to a full memory model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import SolveError
from ..graph import Graph

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = np.iinfo(np.int64).max // 4
"""Bytes that no plan may have: marks what is impossible."""

MAX_LABELS = 20_000
"""Labels over all cuts that the second pass keeps; a cut whose share is exceeded thins its front."""


@dataclass(frozen=True)
class Costs:
    """Weights of all segments (i, j) between cuts; axis 0 is i, axis 1 is j, axis ``mode`` is first.

    Mode 0 is saved, mode 1 recomputed. ``kept`` and ``local`` are bytes, ``seconds`` recomputed time.
    """

    cuts: Ints
    kept: Ints
    local: Ints
    seconds: NDArray[np.float64]


def least_peak_plan(graph: Graph) -> tuple[list[int], list[bool]]:
    """The cuts and modes of the plan with the least peak and, at that peak, the least recomputation.

    Returns:
        Cut positions from 0 to N, and for each segment whether it is recomputed.
    """
    costs = segment_costs(graph)
    peak = least_peak(costs)
    return least_seconds(costs, peak)


def least_peak(costs: Costs) -> int:
    """The least peak in bytes that any interval plan reaches."""
    high = int(costs.local[0, 0, -1])  # everything saved: always possible
    low = -1
    while high - low > 1:
        middle = (low + high) // 2
        if least_kept(costs, middle)[-1] < NEVER:
            high = middle
        else:
            low = middle
    return high


def least_kept(costs: Costs, peak: int) -> Ints:
    """K(j) for every cut j: the least bytes kept by a plan of the operations before j within ``peak``."""
    kept = np.full(len(costs.cuts), NEVER)
    kept[0] = 0
    for j in range(1, len(costs.cuts)):
        before = kept[:j]
        fits = before + costs.local[:, :j, j] <= peak
        kept[j] = min(NEVER, np.where(fits, before + costs.kept[:, :j, j], NEVER).min())
    return kept


def least_seconds(costs: Costs, peak: int) -> tuple[list[int], list[bool]]:
    """The plan with the least recomputed time whose peak is at most ``peak`` bytes.

    Raises:
        SolveError: no plan of the class fits.
    """
    room = _room(costs, peak)
    if room[0] < 0:
        raise SolveError(f"no plan peaks at or below {peak} bytes; the least peak is {least_peak(costs)} bytes")
    count = len(costs.cuts)
    limit = max(8, MAX_LABELS // count)
    kept = np.full((count, limit), NEVER)  # [cut, label], by ascending bytes; NEVER pads
    seconds = np.full((count, limit), np.inf)
    parents = np.zeros((count, limit, 3), np.int64)  # previous cut, its label, mode
    kept[0, 0], seconds[0, 0] = 0, 0.0
    for j in range(1, count):
        limits = np.minimum(peak - costs.local[:, :j, j], room[j] - costs.kept[:, :j, j])
        mode, i, label = np.nonzero(kept[None, :j] <= limits[:, :, None])
        if not len(i):
            continue
        reached = kept[i, label] + costs.kept[mode, i, j]
        taken = seconds[i, label] + costs.seconds[mode, i, j]
        best = _pareto(reached, taken, limit)
        kept[j, : len(best)], seconds[j, : len(best)] = reached[best], taken[best]
        parents[j, : len(best)] = np.column_stack([i[best], label[best], mode[best]])
    return _trace_back(costs, int(np.argmin(seconds[-1])), parents)


def _room(costs: Costs, peak: int) -> Ints:
    """For each cut, the most kept bytes from which the rest of the program still fits; negative: none."""
    room = np.full(len(costs.cuts), -1, np.int64)
    room[-1] = NEVER
    for i in range(len(costs.cuts) - 2, -1, -1):
        after = slice(i + 1, None)
        fits = np.minimum(peak - costs.local[:, i, after], room[after] - costs.kept[:, i, after])
        room[i] = max(-1, fits.max())
    return room


def _pareto(kept: Ints, seconds: NDArray[np.float64], limit: int) -> NDArray[np.intp]:
    """Indices of labels that no other beats in both, by ascending bytes; at most ``limit`` of them."""
    chosen = np.arange(len(kept))
    if len(kept) > 16 * limit:
        chosen = _fastest_per_bucket(kept, seconds, 8 * limit)
    order = chosen[np.lexsort((seconds[chosen], kept[chosen]))]
    lowest = np.minimum.accumulate(seconds[order])
    front = order[np.concatenate([[True], lowest[1:] < lowest[:-1]])]
    if len(front) > limit:
        front = front[np.linspace(0, len(front) - 1, limit).astype(np.intp)]
    return front


def _fastest_per_bucket(kept: Ints, seconds: NDArray[np.float64], buckets: int) -> NDArray[np.intp]:
    """The fastest label of each of equal ranges of bytes, and the label with the fewest bytes."""
    low, high = int(kept.min()), int(kept.max())
    bucket = (kept - low) * buckets // (high - low + 1)
    fastest = np.full(buckets, np.inf)
    np.minimum.at(fastest, bucket, seconds)
    winners = np.flatnonzero(seconds == fastest[bucket])
    _, first = np.unique(bucket[winners], return_index=True)
    return np.unique(np.append(winners[first], int(np.argmin(kept))))


def _trace_back(costs: Costs, label: int, parents: Ints) -> tuple[list[int], list[bool]]:
    j = len(costs.cuts) - 1
    cuts, modes = [int(costs.cuts[j])], []
    while j > 0:
        j, label, mode = (int(number) for number in parents[j, label])
        cuts.append(int(costs.cuts[j]))
        modes.append(bool(mode))
    return cuts[::-1], modes[::-1]


def segment_costs(graph: Graph) -> Costs:
    """``kept``, ``local`` and recomputed ``seconds`` of every segment between two cuts, in both modes."""
    return _SegmentCosts(graph).costs()


class _SegmentCosts:
    """Bytes alive in every segment (i, j) at once, by sums over rectangles of (i, j) or (i, t).

    ``t`` ranges over operations, ``i`` and ``j`` over cuts. A value contributes where its producer lies
    on one side of a cut and its last use, first use or first saver on the other: a rectangle. What is
    relative to K(i) may be negative: kept values that a later segment alone uses are free by then.
    """

    def __init__(self, graph: Graph) -> None:
        ops = graph.operations
        self.graph = graph
        self.n = len(graph)
        self.cuts = np.array(graph.cuts, np.int64)
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
        self.first_used = self._after(np.array(graph.first_uses, np.int64))
        self.passes = ~self.output & (np.array(graph.first_uses) < self.n)  # used, and not for good
        self.last_used = self._after(self.last_use)

        self.internal = np.array([op.internal_bytes for op in ops], np.int64)
        self.small = np.array(graph.keeps_internals, bool)
        self.scratch = np.array([op.scratch_bytes for op in ops], np.int64)
        self.gradient = np.array([op.gradient_bytes for op in ops], np.int64)
        self.backward_peak = np.array([op.backward_bytes for op in ops], np.int64)
        self.seconds = np.array([op.forward_seconds for op in ops])
        self.replayable = np.array([op.replayable for op in ops], bool)

    def costs(self) -> Costs:
        alive = self._alive()
        backward = self._backward()
        saved, again = self._forward()
        local = np.stack([np.maximum(saved, backward), np.maximum(np.maximum(again, backward), self._recompute(alive))])
        seconds = self._from_cut(alive * self.seconds[:, None])
        return Costs(
            cuts=self.cuts,
            kept=np.where(self.later, np.stack(self._kept()), NEVER),
            local=np.where(self.later, local, NEVER),
            seconds=np.stack([np.zeros_like(seconds), seconds]),
        )

    def _kept(self) -> tuple[Ints, Ints]:
        """Bytes that a segment adds to those outliving the forward: saved, recomputed."""
        c = len(self.cuts)
        crossing = self._sum_ij(0, self.made, self.made, self.last_used)
        saved = self._sum_ij(0, self.made, self.made, np.where(self.saved, c, self.last_used))
        return saved + self._internals(self.internal), crossing + self._internals(self.internal * self.small)

    def _forward(self) -> tuple[Ints, Ints]:
        """Most bytes alive in the first run of a segment, above K(i): saved, recomputed."""
        ends = np.minimum(self.last_use + 1 - self.taken_over, self.n)
        peaks = []
        for kept_until, kept_internal in (
            (np.where(self.saved, self.n, ends), self.internal),
            (ends, self.internal * self.small),
        ):
            live = self._sum_it(0, self.made, self.producer, kept_until)
            earlier = _prefix(kept_internal)
            live += (earlier[:-1] + self.internal + self.scratch)[None, :] - earlier[self.cuts][:, None]
            peaks.append(self._peak_until(live))
        return peaks[0], peaks[1]

    def _backward(self) -> Ints:
        """Most bytes alive in the backward of a segment, above K(i)."""
        live = self._sum_it(0, self.made, self.saver, self.n, ~self.output & self.saved)
        live -= self._sum_it(self.made, self.first_used, 0, self.saver, self.passes)
        done = _prefix(self.internal)
        live += (done[1:] + self.backward_peak)[None, :] - done[self.cuts][:, None]
        live += self._later_outputs()[:, None]
        return self._peak_until(live)

    def _recompute(self, alive: Bools) -> Ints:
        """Most bytes alive while a segment runs again, above K(i); NEVER if it must not."""
        base = self._sum_ij(0, self.made, np.maximum(self.made, self.first_used), self.last_used, ~self.output)
        base -= self._sum_ij(self.made, self.first_used, 0, self.first_used, self.passes)
        base += self._internals(self.internal * self.small) + self._later_outputs()[:, None]
        base += self.gradient[np.maximum(self.cuts - 1, 0)][None, :]
        base += self._running(alive)
        banned = self._from_cut(alive & ~self.replayable[:, None]) > 0
        return np.where(banned, NEVER, np.where(self.later, base, 0))

    def _running(self, alive: Bools) -> Ints:
        """Most bytes that the program itself has made and still needs, for every (i, j)."""
        c = len(self.cuts)
        remade = alive[self.producer]  # [v, j]
        stays = remade & self.saved[:, None] & (np.arange(c) >= self.last_used[:, None])
        grown = np.zeros((self.n + 1, c), np.int64)  # [t, j]: bytes that stay, made before t
        np.add.at(grown, self.producer + 1, stays * self.size[:, None])
        grown[1:] += alive * np.where(self.small, 0, self.internal)[:, None]
        grown = np.cumsum(grown, 0)
        live = grown[1:] + (self.scratch + np.where(self.small, self.internal, 0))[:, None]
        live = np.where(alive, live, -NEVER).T.copy()  # [j, t]
        ends = self._needed_until(alive)
        passing = remade & ~stays
        most = np.full((c, c), -NEVER)
        by_group: list[list[int]] = [[] for _ in range(c)]
        for v, group in enumerate(self.made):
            by_group[group - 1].append(v)
        for i in range(c - 2, -1, -1):
            for v in by_group[i]:
                first, last = int(self.producer[v]), int(ends[v].max())
                span = np.arange(first, last + 1)
                live[:, first : last + 1] += (passing[v][:, None] & (span <= ends[v][:, None])) * self.size[v]
            start = int(self.cuts[i])
            most[i, i + 1 :] = live[i + 1 :, start:].max(1) - grown[start, i + 1 :]
        return np.maximum(most, -NEVER)

    def _needed_until(self, alive: Bools) -> Ints:
        """[v, j]: the last operation of the program that needs the remade copy of a passing value."""
        c = np.arange(len(self.cuts))
        until = np.repeat(self.producer[:, None], len(c), 1)
        for t, op in enumerate(self.graph.operations):
            for v in op.reads:
                early = t <= self.graph.last_writes[v]
                needs = alive[t] if early else alive[t] & (c >= self.last_used[v])
                until[v, needs] = t - (v == op.takes_over)
        return until

    def _alive(self) -> Bools:
        """[t, j]: whether a recomputation up to cut j runs operation t (see ``recompute_program``)."""
        c = np.arange(len(self.cuts))
        unkept = c >= self.last_used[:, None]  # [v, j]: no copy is kept at cut j
        remade = unkept & self.saved[:, None]
        alive = np.zeros((self.n, len(c)), bool)
        within = np.arange(self.n)[:, None] < self.cuts
        while True:
            before = int(alive.sum())
            for t in range(self.n - 1, -1, -1):
                op = self.graph.operations[t]
                runs = within[t] if self.internal[t] and not self.small[t] else alive[t]
                for v in op.writes:
                    runs = runs | (remade[v] & within[t])
                alive[t] = runs
                for v in op.reads:
                    remade[v] |= runs if t <= self.graph.last_writes[v] else runs & unkept[v]
            if int(alive.sum()) == before:
                return alive

    def _later_outputs(self) -> Ints:
        """Bytes of outputs made at or after each cut: they stay through the backward."""
        c = np.arange(len(self.cuts))[:, None]
        return ((c < self.made) * np.where(self.output, self.size, 0)).sum(1)

    def _internals(self, per_operation: Ints) -> Ints:
        total = _prefix(per_operation)[self.cuts]
        return np.where(self.later, total[None, :] - total[:, None], 0)

    def _from_cut(self, per_operation: NDArray) -> NDArray:
        """[i, j]: sums of [t, j] over the operations at or after cut i."""
        total = np.zeros((self.n + 1, per_operation.shape[1]), np.float64)
        total[:-1] = np.cumsum(per_operation[::-1], 0)[::-1]
        return total[self.cuts]

    def _peak_until(self, live: Ints) -> Ints:
        """[i, j]: the largest of [i, t] over the operations t between the cuts i and j."""
        peaks = np.maximum.accumulate(np.where(self.inside, live, -NEVER), 1)
        return np.where(self.later, peaks[:, np.maximum(self.cuts - 1, 0)], -NEVER)

    def _sum_ij(
        self, i_from: ArrayLike, i_to: ArrayLike, j_from: ArrayLike, j_to: ArrayLike, chosen: ArrayLike = True
    ) -> Ints:
        c = len(self.cuts)
        return _rectangles((c, c), i_from, i_to, j_from, j_to, np.where(chosen, self.size, 0))

    def _sum_it(
        self, i_from: ArrayLike, i_to: ArrayLike, t_from: ArrayLike, t_to: ArrayLike, chosen: ArrayLike = True
    ) -> Ints:
        return _rectangles((len(self.cuts), self.n), i_from, i_to, t_from, t_to, np.where(chosen, self.size, 0))

    def _after(self, positions: Ints) -> Ints:
        return np.searchsorted(self.cuts, positions, side="right")


def _prefix(weights: Ints) -> Ints:
    """Sums of the weights before each position, length + 1 of them."""
    return np.concatenate([[0], np.cumsum(weights)])


def _rectangles(
    shape: tuple[int, int], r_from: ArrayLike, r_to: ArrayLike, c_from: ArrayLike, c_to: ArrayLike, weights: Ints
) -> Ints:
    """Sum of the weights whose half-open rectangle of rows and columns covers each cell."""
    corners = np.zeros((shape[0] + 1, shape[1] + 1), np.int64)
    rows = [np.broadcast_to(np.minimum(r, shape[0]), weights.shape) for r in (r_from, r_to)]
    columns = [np.broadcast_to(np.minimum(c, shape[1]), weights.shape) for c in (c_from, c_to)]
    weights = np.where((rows[0] < rows[1]) & (columns[0] < columns[1]), weights, 0)
    for sign_r, row in zip((1, -1), rows, strict=True):
        for sign_c, column in zip((1, -1), columns, strict=True):
            np.add.at(corners, (row, column), sign_r * sign_c * weights)
    return np.cumsum(np.cumsum(corners, 0), 1)[: shape[0], : shape[1]]

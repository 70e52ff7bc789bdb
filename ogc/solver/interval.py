"""The outermost level of a plan, exactly: the least peak, and the least recomputation within a peak.

Class of plans: cut the program order at allowed positions; each segment is saved (plain autograd),
recomputed at once, or, given a :class:`NestedTable`, recomputed through parts; every cut keeps its
boundary. For a threshold P, fewer bytes kept before a cut are never worse for what follows, so with

    K(j) = min over i < j and mode of  K(i) + kept(i, j)   where  K(i) + local(i, j) <= P

K(N) is finite exactly if some plan peaks at or below P; bisection over P gives the optimum. A second pass
carries the Pareto front of (bytes kept, time recomputed) at each cut.

Complexity for C cuts: O(C² log bytes) for the bisection, O(C² F) for fronts of at most F = ``MAX_LABELS`` / C
labels. The first pass is exact. The second is exact as long as no front exceeds F; beyond that it keeps F
labels spread over the front, so that the plan still fits but may recompute a little more than the least.

This extends the linear case of Feng & Huang, CVPR 2021, section 3 (checkpoints minimising the kept bytes
plus the largest interior) to a full memory model and to several levels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import SolveError
from ..plan import Segment, recomputed, saved
from .costs import NEVER, Costs, Ints
from .nested import NestedTable

MAX_LABELS = 20_000
"""Labels over all cuts that the second pass keeps; a cut whose share is exceeded thins its front."""

SAVED, AT_ONCE, IN_PARTS = range(3)


class OuterLevel:
    """Plans over the segments of ``costs``, and through the parts of ``table`` if there is one."""

    def __init__(self, costs: Costs, table: NestedTable | None = None) -> None:
        self.cuts = costs.cuts
        self.table = table
        self.kept, self.local, self.seconds = costs.kept, costs.local, costs.seconds
        if table is not None:
            local = np.maximum(table.costs.forward[1], table.least_bytes())
            self.kept = np.concatenate([costs.kept, costs.kept[1:]])
            self.local = np.concatenate([costs.local, local[None]])
            self.seconds = np.concatenate([costs.seconds, costs.seconds[1:]])  # replaced by what the table says

    def least_peak(self) -> int:
        """The least peak in bytes that any plan reaches."""
        high = int(self.local[SAVED, 0, -1])  # everything saved: always possible
        low = -1
        while high - low > 1:
            middle = (low + high) // 2
            reached = self._peak_within(middle)
            low, high = (middle, high) if reached is None else (low, reached)
            if reached is not None and self._peak_within(high - 1) is None:
                break
        return high

    def _peak_within(self, peak: int) -> int | None:
        """The peak that a plan within ``peak`` bytes really has, or None if there is none."""
        kept = self._least_kept(peak)
        if kept[-1] >= NEVER:
            return None
        reached, j = 0, len(self.cuts) - 1
        while j > 0:
            total = np.where(kept[:j] + self.local[:, :j, j] <= peak, kept[:j] + self.kept[:, :j, j], NEVER)
            mode, i = np.unravel_index(int(np.argmin(total)), total.shape)
            reached = max(reached, int(kept[i] + self.local[mode, i, j]))
            j = int(i)
        return reached

    def _least_kept(self, peak: int) -> Ints:
        """K(j) for every cut j: the least bytes kept by a plan of the operations before j within ``peak``."""
        kept = np.full(len(self.cuts), NEVER)
        kept[0] = 0
        for j in range(1, len(self.cuts)):
            before = kept[:j]
            fits = before + self.local[:, :j, j] <= peak
            kept[j] = min(NEVER, np.where(fits, before + self.kept[:, :j, j], NEVER).min())
        return kept

    def fastest(self, peak: int, labels: int = MAX_LABELS) -> tuple[Segment, ...]:
        """The plan with the least recomputed time whose peak is at most ``peak`` bytes, with ``labels`` in all.

        Raises:
            SolveError: no plan of the class fits.
        """
        found = self.find(peak, labels)
        if found is None:
            raise SolveError(f"no plan peaks at or below {peak} bytes; the least peak is {self.least_peak()} bytes")
        return found

    def find(self, peak: int, labels: int = MAX_LABELS) -> tuple[Segment, ...] | None:
        """What :meth:`fastest` returns, or None if no plan of the class fits."""
        room = self._room(peak)
        if room[0] < 0:
            return None
        count = len(self.cuts)
        limit = max(8, labels // count)
        kept = np.full((count, limit), NEVER)  # [cut, label], by ascending bytes; NEVER pads
        seconds = np.full((count, limit), np.inf)
        parents = np.zeros((count, limit, 3), np.int64)  # previous cut, its label, mode
        kept[0, 0], seconds[0, 0] = 0, 0.0
        for j in range(1, count):
            limits = np.minimum(peak - self.local[:, :j, j], room[j] - self.kept[:, :j, j])
            mode, i, label = np.nonzero(kept[None, :j] <= limits[:, :, None])
            if not len(i):
                continue
            reached = kept[i, label] + self.kept[mode, i, j]
            taken = seconds[i, label] + self._seconds(mode, i, j, peak - kept[i, label])
            best = _pareto(reached, taken, limit)
            kept[j, : len(best)], seconds[j, : len(best)] = reached[best], taken[best]
            parents[j, : len(best)] = np.column_stack([i[best], label[best], mode[best]])
        return self._trace_back(peak, int(np.argmin(seconds[-1])), kept, parents)

    def _seconds(self, mode: Ints, i: Ints, j: int, room: Ints) -> NDArray[np.float64]:
        taken = self.seconds[mode, i, j]
        if self.table is not None:
            nested = mode == IN_PARTS
            taken[nested] = self.table.time(i[nested], j, room[nested])
        return taken

    def _room(self, peak: int) -> Ints:
        """For each cut, the most kept bytes from which the rest of the program still fits; negative: none."""
        room = np.full(len(self.cuts), -1, np.int64)
        room[-1] = NEVER
        for i in range(len(self.cuts) - 2, -1, -1):
            after = slice(i + 1, None)
            fits = np.minimum(peak - self.local[:, i, after], room[after] - self.kept[:, i, after])
            room[i] = max(-1, fits.max())
        return room

    def _trace_back(self, peak: int, label: int, kept: Ints, parents: Ints) -> tuple[Segment, ...]:
        j = len(self.cuts) - 1
        segments: list[Segment] = []
        while j > 0:
            i, label, mode = (int(number) for number in parents[j, label])
            if mode == IN_PARTS and self.table is not None:
                segments.append(self.table.segment(i, j, peak - int(kept[i, label])))
            else:
                make = recomputed if mode == AT_ONCE else saved
                segments.append(make(int(self.cuts[i]), int(self.cuts[j])))
            j = i
        return tuple(reversed(segments))


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

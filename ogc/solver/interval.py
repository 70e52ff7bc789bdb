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

SAVED, AGAIN = range(2)


class OuterLevel:
    """Plans over the segments of ``costs``, run again at once or as ``table`` says, if there is one."""

    def __init__(self, costs: Costs, table: NestedTable | None = None) -> None:
        self.cuts = costs.cuts
        self.table = table
        # By [mode, j, i]: everything below looks at all segments that end at one cut.
        self.kept, self.local = (np.ascontiguousarray(each.swapaxes(1, 2)) for each in (costs.kept, costs.local))
        self.seconds = np.ascontiguousarray(costs.seconds.T)
        self.at_once = self.local[AGAIN].copy()
        if table is not None:
            nested = np.maximum(table.costs.forward[1], table.least_bytes()).T
            np.minimum(self.local[AGAIN], nested, out=self.local[AGAIN])

    def least_peak(self, *, above: int = -1, tolerance: float = 0.0) -> int:
        """The least peak in bytes that any plan reaches.

        Args:
            above: bytes that no plan is known to stay within.
            tolerance: the peak may be larger than the least by this share of it.
        """
        high = int(self.local[SAVED, -1, 0])  # everything saved: always possible
        low = min(above, high - 1)
        while high - low > max(1.0, tolerance * high):
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
            total = np.where(kept[:j] + self.local[:, j, :j] <= peak, kept[:j] + self.kept[:, j, :j], NEVER)
            mode, i = np.unravel_index(int(np.argmin(total)), total.shape)
            reached = max(reached, int(kept[i] + self.local[mode, j, i]))
            j = int(i)
        return reached

    def _least_kept(self, peak: int) -> Ints:
        """K(j) for every cut j: the least bytes kept by a plan of the operations before j within ``peak``."""
        kept = np.full(len(self.cuts), NEVER)
        kept[0] = 0
        for j in range(1, len(self.cuts)):
            before = kept[:j]
            fits = before + self.local[:, j, :j] <= peak
            kept[j] = min(NEVER, np.where(fits, before + self.kept[:, j, :j], NEVER).min())
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
            limits = np.minimum(peak - self.local[:, j, :j], room[j] - self.kept[:, j, :j])
            mode, i = np.nonzero(kept[:j, 0] <= limits)
            if not len(i):
                continue
            pair, label = np.nonzero(kept[i] <= limits[mode, i, None])
            mode, i = mode[pair], i[pair]
            before = kept[i, label]
            reached = before + self.kept[mode, j, i]
            taken = seconds[i, label] + np.where(mode == AGAIN, self._seconds(i, j, peak - before), 0.0)
            best = _pareto(reached, taken, limit)
            kept[j, : len(best)], seconds[j, : len(best)] = reached[best], taken[best]
            parents[j, : len(best)] = np.column_stack([i[best], label[best], mode[best]])
        return self._trace_back(peak, int(np.argmin(seconds[-1])), kept, parents)

    def _seconds(self, i: Ints, j: int, room: Ints) -> NDArray[np.float64]:
        """Time of running segments (i, j) again with so many bytes at hand."""
        taken = self.seconds[j, i]
        if self.table is None:
            return taken
        return np.where(self.at_once[j, i] <= room, taken, self.table.time(i, j, room))

    def _room(self, peak: int) -> Ints:
        """For each cut, the most kept bytes from which the rest of the program still fits; negative: none."""
        room = np.full(len(self.cuts), -1, np.int64)
        room[-1] = NEVER
        for j in range(len(self.cuts) - 1, 0, -1):
            fits = np.minimum(peak - self.local[:, j, :j], room[j] - self.kept[:, j, :j])
            np.maximum(room[:j], fits.max(0), out=room[:j])
        return room

    def _trace_back(self, peak: int, label: int, kept: Ints, parents: Ints) -> tuple[Segment, ...]:
        j = len(self.cuts) - 1
        segments: list[Segment] = []
        while j > 0:
            i, label, mode = (int(number) for number in parents[j, label])
            room = peak - int(kept[i, label])
            if mode == AGAIN and self.table is not None and room < self.at_once[j, i]:
                segments.append(self.table.segment(i, j, room))
            else:
                make = recomputed if mode == AGAIN else saved
                segments.append(make(int(self.cuts[i]), int(self.cuts[j])))
            j = i
        return tuple(reversed(segments))


def _pareto(kept: Ints, seconds: NDArray[np.float64], limit: int) -> NDArray[np.intp]:
    """Indices of labels that no other beats in both, by ascending bytes; at most ``limit`` of them."""
    if len(kept) > 16 * limit:
        order = _fastest_per_bucket(kept, seconds, 8 * limit)
    else:
        order = np.lexsort((seconds, kept))
    lowest = np.minimum.accumulate(seconds[order])
    front = order[np.concatenate([[True], lowest[1:] < lowest[:-1]])]
    if len(front) > limit:
        front = front[np.linspace(0, len(front) - 1, limit).astype(np.intp)]
    return front


def _fastest_per_bucket(kept: Ints, seconds: NDArray[np.float64], buckets: int) -> NDArray[np.intp]:
    """The label with the fewest bytes, and the fastest of each of equal ranges of bytes, by ascending range."""
    low, high = int(kept.min()), int(kept.max())
    bucket = (kept - low) * buckets // (high - low + 1)
    slowest_first = np.argsort(-seconds, kind="stable")
    fastest = np.full(buckets, -1)
    fastest[bucket[slowest_first]] = slowest_first  # the last of those written to one place stays
    return np.append(np.argmin(kept), fastest[fastest >= 0])

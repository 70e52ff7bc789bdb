"""The outermost level of a plan, exactly: the least peak, and the least recomputation within a peak.

Class of plans: cut the program order at allowed positions; each segment is saved (plain autograd),
recomputed at once, or, given a :class:`NestedTable`, recomputed through parts; every cut keeps its
boundary. For a threshold P, fewer bytes kept before a cut are never worse for what follows, so with

    K(j) = min over i < j and mode of  K(i) + kept(i, j)   where  K(i) + local(i, j) <= P

K(N) is finite exactly if some plan peaks at or below P; bisection over P gives the optimum. A second pass
carries the Pareto front of (bytes kept, time recomputed) at each cut.

Complexity for C cuts: O(C² log bytes) for the bisection, O(C² F) for fronts of at most F = ``MAX_LABELS`` / C
labels. The first pass is exact. The second is exact as long as no front exceeds F; beyond that it keeps the
F labels with the least bound on what they lead to, so that the plan still fits but may recompute a little
more than the least. The bound is a Lagrangian relaxation: bytes have a price, and the rest of the program
costs at least so much. What it shows to be slower than a plan already found is left out.

This extends the linear case of Feng & Huang, CVPR 2021, section 3 (checkpoints minimising the kept bytes
plus the largest interior) to a full memory model and to several levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import SolveError
from ..plan import Segment, recomputed, saved
from .costs import NEVER, Costs, Ints
from .nested import NestedTable

MAX_LABELS = 80_000
"""Labels over all cuts that the second pass keeps; a cut whose share is exceeded thins its front."""

PRICES = 12
"""Prices of a byte that are tried."""

SAVED, AGAIN = range(2)

Ways = list[tuple[int, slice, Ints, NDArray[np.float64]]]
"""For each cut j, last first: the cuts i before it, and by [mode, i] bytes and seconds of (i, j), or NEVER and inf."""


@dataclass(frozen=True)
class _Guide:
    """The ``price`` of a byte in seconds, and the least that the ``rest`` of the program costs from each cut."""

    price: float
    rest: NDArray[np.float64]


@dataclass(frozen=True)
class _Labels:
    """By [cut, label], by ascending bytes, padded with NEVER: a plan up to the cut.

    ``parents`` are the previous cut, its label, and the mode of the segment between.
    """

    kept: Ints
    seconds: NDArray[np.float64]
    parents: Ints
    limit: int

    @classmethod
    def empty(cls, cuts: int, limit: int) -> _Labels:
        shape = (cuts, limit)
        return cls(np.full(shape, NEVER), np.full(shape, np.inf), np.zeros((*shape, 3), np.int64), limit)


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
        self.least_local = self.local.min(0)

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
            if reached is not None and not tolerance and self._peak_within(high - 1) is None:
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
        for j, near in self._segments_within(peak):
            before = kept[near]
            fits = before + self.local[:, j, near] <= peak
            kept[j] = min(NEVER, np.where(fits, before + self.kept[:, j, near], NEVER).min())
        return kept

    def _segments_within(self, peak: int) -> list[tuple[int, slice]]:
        """For each cut j, the cuts i < j among which are all (i, j) that fit by themselves."""
        first = (self.least_local <= peak).argmax(1)
        return [(j, slice(int(first[j]), j)) for j in range(1, len(self.cuts))]

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
        guide = self._guide(peak)
        rough = self._spread_labels(peak, room, guide, labels // 4)
        exact = self._spread_labels(peak, room, guide, labels, within=rough.seconds[-1].min() * (1 + 1e-9))
        best = min(exact, rough, key=lambda found: found.seconds[-1].min())
        return self._trace_back(peak, int(np.argmin(best.seconds[-1])), best)

    def _spread_labels(self, peak: int, room: Ints, guide: _Guide, labels: int, within: float = np.inf) -> _Labels:
        """The fronts of all cuts, without what is known to take longer than ``within`` seconds in the end."""
        count = len(self.cuts)
        found = _Labels.empty(count, max(8, labels // count))
        found.kept[0, 0], found.seconds[0, 0] = 0, 0.0
        for j, near in self._segments_within(peak):
            limits = np.minimum(peak - self.local[:, j, near], room[j] - self.kept[:, j, near])
            mode, i = np.nonzero(found.kept[near, 0] <= limits)
            pair, label = np.nonzero(found.kept[near][i] <= limits[mode, i, None])
            mode, i = mode[pair], near.start + i[pair]
            before = found.kept[i, label]
            kept = before + self.kept[mode, j, i]
            seconds = found.seconds[i, label] + np.where(mode == AGAIN, self._seconds(i, j, peak - before), 0.0)
            estimates = seconds + guide.price * (kept - peak) + guide.rest[j]
            promising = np.flatnonzero(estimates <= within)
            front = promising[_front(kept[promising], seconds[promising])]
            best = front[_thinned(estimates[front], found.limit)]
            found.kept[j, : len(best)], found.seconds[j, : len(best)] = kept[best], seconds[best]
            found.parents[j, : len(best)] = np.column_stack([i[best], label[best], mode[best]])
        return found

    def _guide(self, peak: int) -> _Guide:
        """Prices for plans within ``peak`` bytes.

        The Lagrangian relaxation of the bytes kept in the end: at the price that maximises its bound, what a
        label costs together with the least that can follow tells how good the plans are that it leads to.
        """
        least = np.minimum(self._least_kept(peak), peak)
        last = len(self.cuts) - 1
        ways: Ways = []
        for j, near in reversed(self._segments_within(peak)):
            i = np.arange(near.start, near.stop)
            local = self.local[:, j, near]
            kept = np.where(least[i] + local <= peak, local if j == last else self.kept[:, j, near], NEVER)
            seconds = np.stack([np.zeros(len(i)), self._seconds(i, j, peak - least[i])])
            ways.append((j, near, kept, np.where(kept < NEVER, seconds, np.inf)))
        low, high = -5.0, 5.0  # powers of ten of the price, in times the program takes per byte at hand
        unit = max(seconds.max(initial=0.0, where=np.isfinite(seconds)) for _, _, _, seconds in ways) / max(1, peak)
        best = _Guide(0.0, np.zeros(last + 1))
        for _ in range(PRICES):
            price = unit * 10 ** ((low + high) / 2)
            rest, kept_bytes = self._rest(ways, price)
            best = max(best, _Guide(price, rest), key=lambda guide: guide.rest[0] - guide.price * peak)
            low, high = ((low + high) / 2, high) if kept_bytes > peak else (low, (low + high) / 2)
        return best

    def _rest(self, ways: Ways, price: float) -> tuple[NDArray[np.float64], float]:
        """The least seconds and price of bytes from each cut to the end, and the bytes of the cheapest whole plan."""
        rest = np.full(len(self.cuts), np.inf)
        kept_bytes = np.zeros(len(self.cuts))
        rest[-1] = 0.0
        for j, near, kept, seconds in ways:
            total = seconds + price * kept + rest[j]
            mode = total.argmin(0)
            each = mode, np.arange(total.shape[1])
            better = total[each] < rest[near]
            rest[near] = np.where(better, total[each], rest[near])
            kept_bytes[near] = np.where(better, kept[each] + kept_bytes[j], kept_bytes[near])
        return rest, float(kept_bytes[0])

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
        for j, near in reversed(self._segments_within(peak)):
            fits = np.minimum(peak - self.local[:, j, near], room[j] - self.kept[:, j, near])
            np.maximum(room[near], fits.max(0), out=room[near])
        return room

    def _trace_back(self, peak: int, label: int, found: _Labels) -> tuple[Segment, ...]:
        j = len(self.cuts) - 1
        segments: list[Segment] = []
        while j > 0:
            i, label, mode = (int(number) for number in found.parents[j, label])
            room = peak - int(found.kept[i, label])
            if mode == AGAIN and self.table is not None and room < self.at_once[j, i]:
                segments.append(self.table.segment(i, j, room))
            else:
                make = recomputed if mode == AGAIN else saved
                segments.append(make(int(self.cuts[i]), int(self.cuts[j])))
            j = i
        return tuple(reversed(segments))


def _front(kept: Ints, seconds: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices of labels that no other beats in both, by ascending bytes."""
    order = np.lexsort((seconds, kept))
    lowest = np.minimum.accumulate(seconds[order])
    return order[np.concatenate([[True], lowest[1:] < lowest[:-1]])[: len(order)]]


def _thinned(estimates: NDArray[np.float64], limit: int) -> NDArray[np.intp]:
    """At most ``limit`` indices, ascending: most of them promise the most, the others are spread evenly."""
    if len(estimates) <= limit:
        return np.arange(len(estimates))
    most = limit * 7 // 8
    promising = np.argpartition(estimates, most)[:most]
    return np.union1d(promising, np.linspace(0, len(estimates) - 1, limit - most).astype(np.intp))

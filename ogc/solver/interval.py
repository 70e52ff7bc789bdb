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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import SolveError
from ..plan import Segment, recomputed, saved
from .costs import NEVER, Costs, Ints
from .nested import NestedTable

MAX_LABELS = 80_000
ROUGH_LABELS = 20_000
"""Labels over all cuts that the second pass keeps, where the best is wanted and where a good plan will do; a cut
whose share is exceeded thins its front."""

PRICES = 12
CLOSE = 3e-3
"""Prices of a byte that are tried at most, and how close to the best bound its price may leave it."""

SAVED, AGAIN = range(2)


@dataclass(frozen=True)
class _Guide:
    """The ``price`` of a byte in seconds, and the least that the ``rest`` of the program costs from each cut.

    ``kept_bytes`` are those of the cheapest plan of the whole program.
    """

    price: float
    rest: NDArray[np.float64]
    kept_bytes: float

    @property
    def seconds(self) -> float:
        """What the cheapest plan of the whole program takes without the price of its bytes."""
        return float(self.rest[0] - self.price * self.kept_bytes)

    def bound(self, peak: int) -> float:
        """Seconds that no plan within ``peak`` bytes can be below."""
        return float(self.rest[0] - self.price * peak)


class _Segments(NamedTuple):
    """Those that end at cut j and start at the cuts ``near``: by [mode, i] what they keep and need."""

    j: int
    near: slice
    kept: Ints
    local: Ints


@dataclass(frozen=True)
class _Ways:
    """Segments (i, j), by ascending i: by [mode] the bytes they keep, or infinity, and their time if run again."""

    i: Ints
    j: Ints
    kept: NDArray[np.float64]
    seconds: NDArray[np.float64]

    def cheapest(self, price: float) -> _Guide:
        """The cheapest plan of these segments at a price of more than 0."""
        costs = price * self.kept
        costs[AGAIN] += self.seconds
        cost, mode = costs.min(0), costs.argmin(0)
        last = int(self.j.max())
        firsts = np.searchsorted(self.i, np.arange(last + 1))
        rest = np.full(last + 1, np.inf)
        rest[last] = 0.0
        ways = np.zeros(last, np.int64)
        for i in range(last - 1, -1, -1):
            here = slice(firsts[i], firsts[i + 1])
            totals = cost[here] + rest[self.j[here]]
            if len(totals):
                way = int(totals.argmin())
                rest[i], ways[i] = totals[way], firsts[i] + way
        at, kept_bytes = 0, 0.0
        while at < last:
            way = ways[at]
            at, kept_bytes = int(self.j[way]), kept_bytes + float(self.kept[mode[way], way])
        return _Guide(price, rest, kept_bytes)


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
        self.grain = costs.grain
        self.table = table
        self.kept, self.local, self.seconds = costs.kept, costs.local, costs.seconds
        self.at_once = costs.local[AGAIN]
        if table is not None:
            nested = np.maximum(table.costs.forward[1], table.least_bytes()).T
            self.local = np.stack([costs.local[SAVED], np.minimum(self.at_once, nested)])
        self.least_local = self.local.min(0)

    def least_peak(self, *, above: int = -1, near: int | None = None, tolerance: float = 0.0) -> int:
        """The least peak in bytes that any plan reaches.

        Args:
            above: bytes that no plan is known to stay within.
            near: a guess, from which to go down in small steps at first.
            tolerance: the peak may be larger than the least by this share of it.
        """
        high = step = int(self.local[SAVED, -1, 0])  # everything saved: always possible
        low = min(above, high - 1)
        if near is not None:
            high = self._peak_within(near, self._segments_within(near)) or high
            step = int(max(self.grain, tolerance * near))
        segments = self._segments_within(high)
        while high - low > max(self.grain, tolerance * high):
            middle = max((low + high) // 2, high - step)
            reached = self._peak_within(middle, segments)
            low, high = (middle, high) if reached is None else (low, reached)
            step *= 4
        return high

    def _peak_within(self, peak: int, segments: list[_Segments]) -> int | None:
        """The peak that a plan within ``peak`` bytes really has, or None if there is none."""
        least = self._least_kept(peak, segments)
        if least[-1] >= NEVER:
            return None
        reached, j = 0, len(self.cuts) - 1
        while j > 0:
            _, near, kept, local = segments[j - 1]
            before = least[near]
            total = np.where(before + local <= peak, before + kept, NEVER)
            mode, i = np.unravel_index(int(np.argmin(total)), total.shape)
            reached = max(reached, int(before[i] + local[mode, i]))
            j = near.start + int(i)
        return reached

    def _least_kept(self, peak: int, segments: list[_Segments]) -> Ints:
        """K(j) for every cut j: the least bytes kept by a plan of the operations before j within ``peak``."""
        least = np.full(len(self.cuts), NEVER)
        least[0] = 0
        for j, near, kept, local in segments:
            before = least[near]
            least[j] = (before + kept).min(initial=NEVER, where=before + local <= peak)
        return least

    def _segments_within(self, peak: int) -> list[_Segments]:
        """For each cut j, segments (i, j) among which are all that fit by themselves."""
        first = (self.least_local <= peak).argmax(1)
        near = [slice(int(first[j]), j) for j in range(1, len(self.cuts))]
        return [_Segments(j, i, self.kept[:, j, i].copy(), self.local[:, j, i].copy()) for j, i in enumerate(near, 1)]

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
        segments = self._segments_within(peak)
        room = self._room(peak, segments)
        if room[0] < 0:
            return None
        guide = self._guide(peak, segments)
        best = self._spread_labels(peak, segments, room, guide, min(labels, ROUGH_LABELS))
        if labels > ROUGH_LABELS:
            within = best.seconds[-1].min() * (1 + 1e-9)
            more = self._spread_labels(peak, segments, room, guide, labels, within)
            best = min(more, best, key=lambda found: found.seconds[-1].min())
        return self._trace_back(peak, int(np.argmin(best.seconds[-1])), best)

    def _spread_labels(
        self, peak: int, segments: list[_Segments], room: Ints, guide: _Guide, labels: int, within: float = np.inf
    ) -> _Labels:
        """The fronts of all cuts, without what is known to take longer than ``within`` seconds in the end."""
        count = len(self.cuts)
        found = _Labels.empty(count, max(8, labels // count))
        found.kept[0, 0], found.seconds[0, 0] = 0, 0.0
        for j, near, adds, local in segments:
            limits = np.minimum(peak - local, room[j] - adds)
            mode, i = np.nonzero(found.kept[near, 0] <= limits)
            pair, label = np.nonzero(found.kept[near][i] <= limits[mode, i, None])
            mode, i = mode[pair], near.start + i[pair]
            before = found.kept[i, label]
            kept = before + adds[mode, i - near.start]
            seconds = found.seconds[i, label] + np.where(mode == AGAIN, self._seconds(i, j, peak - before), 0.0)
            estimates = seconds + guide.price * (kept - peak) + guide.rest[j]
            promising = np.flatnonzero(estimates <= within)
            front = promising[_front(kept[promising], seconds[promising])]
            best = front[_thinned(estimates[front], found.limit)]
            found.kept[j, : len(best)], found.seconds[j, : len(best)] = kept[best], seconds[best]
            found.parents[j, : len(best)] = np.column_stack([i[best], label[best], mode[best]])
        return found

    def _guide(self, peak: int, segments: list[_Segments]) -> _Guide:
        """Prices for plans within ``peak`` bytes.

        The Lagrangian relaxation of the bytes kept in the end: at the price that maximises its bound, what a
        label costs together with the least that can follow tells how good the plans are that it leads to.
        """
        least = np.minimum(self._least_kept(peak, segments), peak)
        i, j = np.nonzero((least + self.least_local <= peak).T)
        leaves = np.where(j == len(self.cuts) - 1, self.local[:, j, i], self.kept[:, j, i])
        kept = np.where(least[i] + self.local[:, j, i] <= peak, leaves, np.inf)
        ways = _Ways(i, j, kept, np.where(kept[AGAIN] < np.inf, self._seconds(i, j, peak - least[i]), np.inf))
        longest = ways.seconds.max(initial=0.0, where=np.isfinite(ways.seconds)) or 1.0
        # What the cheapest plan costs is a line over the prices, and no plan is cheaper than that anywhere. Of a plan
        # that is too large it rises, of one that fits it falls: the best price is near where they meet.
        large, fits = (ways.cheapest(power * longest / max(1, peak)) for power in (1e-5, 1e5))
        best = max(large, fits, key=lambda guide: guide.bound(peak))
        for _ in range(PRICES):
            if not fits.kept_bytes <= peak < large.kept_bytes:
                break
            price = (fits.seconds - large.seconds) / (large.kept_bytes - fits.kept_bytes)
            found = ways.cheapest(price)
            best = max(best, found, key=lambda guide: guide.bound(peak))
            if found.bound(peak) >= (1 - CLOSE) * (fits.seconds + price * (fits.kept_bytes - peak)):
                break
            large, fits = (found, fits) if found.kept_bytes > peak else (large, found)
        return best

    def _seconds(self, i: Ints, j: Ints | int, room: Ints) -> NDArray[np.float64]:
        """Time of running segments (i, j) again with so many bytes at hand."""
        taken = self.seconds[j, i]
        if self.table is None:
            return taken
        return np.where(self.at_once[j, i] <= room, taken, self.table.time(i, j, room))

    def _room(self, peak: int, segments: list[_Segments]) -> Ints:
        """For each cut, the most kept bytes from which the rest of the program still fits; negative: none."""
        room = np.full(len(self.cuts), -1, np.int64)
        room[-1] = NEVER
        for j, near, kept, local in reversed(segments):
            fits = np.minimum(peak - local, room[j] - kept)
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
    order = np.argsort(kept, kind="stable")
    lowest = np.minimum.accumulate(seconds[order])
    front = order[np.concatenate([[True], lowest[1:] < lowest[:-1]])[: len(order)]]
    return front[np.concatenate([np.diff(kept[front]) > 0, [True]])[: len(front)]]  # of equals, the last is fastest


def _thinned(estimates: NDArray[np.float64], limit: int) -> NDArray[np.intp]:
    """At most ``limit`` indices, ascending: most of them promise the most, the others are spread evenly."""
    if len(estimates) <= limit:
        return np.arange(len(estimates))
    most = limit * 7 // 8
    promising = np.argpartition(estimates, most)[:most]
    return np.union1d(promising, np.linspace(0, len(estimates) - 1, limit - most).astype(np.intp))

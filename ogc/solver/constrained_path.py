"""The fastest path through the cuts of a program within so many bytes, by label setting.

Labels (Hansen, "Bicriterion path problems", 1980; Martins, "On a multicriteria shortest path problem", 1984) are plans
up to a cut: the bytes they keep and the time they recompute. Vertices are cuts, edges segments. At each cut those stay
that no other beats in both, its front. A Lagrangian relaxation, in which bytes have a price, bounds what follows a
label. From both ends, it tells which segments no plan within a given time has: first those of plans within half a
percent of the bound are looked at, then of slower ones, until there is a plan.

Complexity for W segments and C cuts: O(W + C) array steps for a price, O(W F) for fronts of F labels. Exact while no
front exceeds F; else the F labels stay that promise most: the plan fits, but may recompute a little more than need be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .costs import NEVER, Ints

Seconds = NDArray[np.float64]

TimeOfSegments = Callable[[Ints, Ints], Seconds]
"""From the numbers of segments and the bytes kept before each."""

LABELS = 80_000
"""Labels that are kept over all cuts; a cut whose share is exceeded thins its front. Time and memory grow with them."""

PRICES = 12
CLOSE = 3e-3
"""Prices of a byte that are tried at most, and the share of the best bound that may be missing: less than the first of
``SLACK``, so that a closer price would not change which segments are looked at."""

SLACK = (0.004, 0.012, 0.04, 0.12, 0.4, np.inf)
"""Shares of the bound, and of a hundredth of the time of the longest segment, by which a plan may exceed
the bound: tried in turn until there is a plan, each about three times the one before."""

NEAR_ENOUGH = 1.1
"""Ratio of a plan's time to the bound up to which it is taken where fewer labels are asked for."""


@dataclass(frozen=True)
class _Priced:
    """Seconds that the ``rest`` of the program costs from each cut at the ``price`` of a byte, by the cheapest plan."""

    price: float
    rest: Seconds
    kept_bytes: float

    @property
    def seconds(self) -> float:
        """Time of the cheapest plan of the whole program, without the price of its bytes."""
        return float(self.rest[0] - self.price * self.kept_bytes)

    def bound(self, peak: int) -> float:
        """Seconds that no plan within ``peak`` bytes can be below."""
        return float(self.rest[0] - self.price * peak)


class ConstrainedPaths:
    """Plans within ``peak`` bytes: paths from the first cut to the last, whose edges are numbered segments.

    Args:
        peak: most bytes alive.
        i, j: the cuts that each segment lies between, by ascending j.
        limit: most bytes kept before cut i with which the segment fits, and something after it.
        kept: bytes that it adds to those; in the end of the program, the most bytes alive in it.
        seconds: the least time that recomputes it.
        time: seconds that recompute each segment.
    """

    def __init__(
        self, peak: int, i: Ints, j: Ints, limit: Ints, kept: Ints, seconds: Seconds, time: TimeOfSegments
    ) -> None:
        self.peak, self.time, self.last = peak, time, int(j[-1])
        self.i, self.j, self.limit, self.kept, self.seconds = i, j, limit, kept, seconds
        by_i = np.argsort(i.astype(np.uint16), kind="stable")  # a radix sort, for there are few cuts
        self.from_i = self.j[by_i], self.kept[by_i], self.seconds[by_i]
        self.first_from = np.cumsum([0, *np.bincount(i, minlength=self.last)]).tolist()
        self.first_to = np.searchsorted(j, np.arange(self.last + 2)).tolist()

    def fastest(self, labels: int, slack: Sequence[float] = SLACK) -> list[tuple[int, int]]:
        """The fastest plan, with so many labels in all: the number of each segment and the bytes kept before it."""
        guide = self._guide()
        bound, longest = max(0.0, guide.bound(self.peak)), float(self.seconds.max())
        through = self._through(guide)
        for share in slack:
            within = bound + share * (bound + longest / 100)
            path, seconds = self._fastest_within(guide, through, within, labels)
            if path:
                break
        if seconds <= within * (1.0 if labels >= LABELS else NEAR_ENOUGH):
            return path
        other, seconds_of_other = self._fastest_within(guide, through, seconds, labels)
        return other if seconds_of_other < seconds else path

    def _guide(self) -> _Priced:
        """The price at which the bound is best, about.

        What the cheapest plan costs is a line over the prices, and no plan is cheaper than that anywhere. Of a plan
        that is too large it rises, of one that fits it falls: the best price is near where they meet.
        """
        unit = (float(self.seconds.max()) or 1.0) / max(1, self.peak)
        large, fits = self._cheapest(1e-5 * unit), self._cheapest(1e5 * unit)
        best = max(large, fits, key=lambda priced: priced.bound(self.peak))
        for _ in range(PRICES):
            if not fits.kept_bytes <= self.peak < large.kept_bytes:
                break
            price = (fits.seconds - large.seconds) / (large.kept_bytes - fits.kept_bytes)
            found = self._cheapest(price)
            best = max(best, found, key=lambda priced: priced.bound(self.peak))
            if found.bound(self.peak) >= (1 - CLOSE) * (fits.seconds + price * (fits.kept_bytes - self.peak)):
                break
            large, fits = (found, fits) if found.kept_bytes > self.peak else (large, found)
        return best

    def _cheapest(self, price: float) -> _Priced:
        """The cheapest plan at a price."""
        ends, kept, seconds = self.from_i
        costs = price * kept + seconds
        rest = np.full(self.last + 1, np.inf)
        rest[-1] = 0.0
        choices = [0] * self.last
        for i in range(self.last - 1, -1, -1):
            first, stop = self.first_from[i], self.first_from[i + 1]
            if first < stop:
                totals = costs[first:stop] + rest[ends[first:stop]]
                best = int(totals.argmin())
                choices[i], rest[i] = first + best, totals[best]
        cut, kept_bytes = 0, 0.0
        while cut < self.last:
            kept_bytes += float(kept[choices[cut]])
            cut = int(ends[choices[cut]])
        return _Priced(price, rest, kept_bytes)

    def _through(self, guide: _Priced) -> Seconds:
        """For each segment, the time that no plan with it is below."""
        costs = guide.price * self.kept + self.seconds
        before = np.full(self.last + 1, np.inf)
        before[0] = 0.0
        for j, (first, stop) in enumerate(pairwise(self.first_to)):
            if first < stop:
                before[j] = (before[self.i[first:stop]] + costs[first:stop]).min()
        return before[self.i] + costs + guide.rest[self.j] - guide.price * self.peak

    def _by_end(self, numbers: Ints) -> Iterator[tuple[int, Ints]]:
        """The segments of these numbers that end at each cut, cut by cut."""
        for j, (first, stop) in enumerate(pairwise(np.searchsorted(numbers, self.first_to).tolist())):
            if first < stop:
                yield j, numbers[first:stop]

    def _fastest_within(
        self, guide: _Priced, through: Seconds, within: float, labels: int
    ) -> tuple[list[tuple[int, int]], float]:
        """The fastest plan of those that the guide gives so many seconds, if there is one, and its time."""
        count = max(8, labels // (self.last + 1))
        kept = np.full((self.last + 1, count), NEVER)
        seconds = np.full(kept.shape, np.inf)
        parents = np.zeros((*kept.shape, 2), np.int64)  # a segment, and the label that it starts from
        costs = np.full(kept.shape, np.inf)  # seconds and the price of the bytes
        kept[0, 0], seconds[0, 0], costs[0, 0] = 0, 0.0, 0.0
        least_kept, least_costs = kept[:, 0].copy(), costs[:, 0].copy()  # of the labels at each cut
        # What is left for what comes before each segment, if the segment takes as little time as it may.
        left = within + guide.price * self.peak - guide.rest[self.j] - guide.price * self.kept - self.seconds
        for j, here in self._by_end(np.flatnonzero(through <= within)):
            i = self.i[here]
            some = (least_kept[i] <= self.limit[here]) & (least_costs[i] <= left[here])
            here, i = here[some], i[some]
            fits = kept[i] <= self.limit[here, None]
            fits &= costs[i] <= left[here, None]
            row, parent = np.nonzero(fits)
            if not len(row):
                continue
            segment, start = here[row], i[row] * count + parent
            before = kept.reshape(-1)[start]
            after = before + self.kept[segment]
            taken = seconds.reshape(-1)[start] + self.time(segment, before)
            estimates = taken + guide.price * (after - self.peak) + guide.rest[j]
            promising = np.flatnonzero(estimates <= within)
            front = promising[_front(after[promising], taken[promising])]
            best = front[_thinned(estimates[front], count)]
            after, taken = after[best], taken[best]
            kept[j, : len(best)], seconds[j, : len(best)] = after, taken
            costs[j, : len(best)] = taken + guide.price * after
            parents[j, : len(best)] = np.stack([segment[best], parent[best]], 1)
            least_kept[j], least_costs[j] = kept[j].min(), costs[j].min()
        path: list[tuple[int, int]] = []
        cut, label = self.last, int(seconds[-1].argmin())
        while cut > 0 and seconds[cut, label] < np.inf:
            number, label = (int(n) for n in parents[cut, label])
            cut = int(self.i[number])
            path.append((number, int(kept[cut, label])))
        return path[::-1], float(seconds[-1].min())


def _front(kept: Ints, seconds: Seconds) -> NDArray[np.intp]:
    """Indices of labels that no other beats in both, by ascending bytes."""
    order = np.argsort(kept, kind="stable")
    lowest = np.minimum.accumulate(seconds[order])
    front = order[_where_new(lowest)]
    return front[_where_new(kept[front][::-1])[::-1]]  # of equals, the last is fastest


def _where_new(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Which numbers are not the same as the one before."""
    return np.concatenate([np.ones(len(numbers[:1]), bool), numbers[1:] != numbers[:-1]])


def _thinned(estimates: Seconds, limit: int) -> NDArray[np.intp]:
    """At most ``limit`` indices, ascending: most of them promise the most, the others are spread evenly."""
    if len(estimates) <= limit:
        return np.arange(len(estimates))
    most = limit * 7 // 8
    chosen = np.zeros(len(estimates), bool)
    chosen[np.argpartition(estimates, most)[:most]] = True
    few = limit - most
    chosen[np.arange(few) * (len(estimates) - 1) // max(1, few - 1)] = True
    return np.flatnonzero(chosen)

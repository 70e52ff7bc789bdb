"""The fastest path through the cuts of a program within so many bytes, by label setting.

Labels (Hansen, "Bicriterion path problems", 1980; Martins, "On a multicriteria shortest path problem", 1984) are plans
up to a cut: the bytes they keep and the time they recompute. Vertices are cuts, edges segments. At each cut those stay
that no other beats in both, its front. A Lagrangian relaxation, in which bytes have prices, bounds what follows a label
(:mod:`ogc.solver.paths.prices`). From both ends, it tells which segments no plan within a given time has: first those
of plans within half a percent of the bound are looked at, then of slower ones, until there is a plan, then of all that
are faster than that.

Complexity for W segments and C cuts: O(W + C) array steps for a price, O(W F) for fronts of F labels. Exact while no
front exceeds F; else the F labels stay that promise most: the plan fits, but may recompute a little more than need be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..costs import NEVER, Ints
from .prices import Priced, Seconds, Segments, at_the_end, raised

TimeOfSegments = Callable[[Ints, Ints], Seconds]
"""From the numbers of segments and the bytes kept before each."""

LABELS = 30_000
"""Labels that are kept over all cuts; a cut whose share is exceeded thins its front. Time and memory grow with them."""

SLACK = (0.004, 0.012, 0.04, 0.07, 0.12, 0.4, np.inf)
"""Shares of the bound, and of a hundredth of the time of the longest segment, by which a plan may exceed
the bound: tried in turn until there is a plan, each two or three times the one before."""

HALFWAY = 1.5
"""Times as many segments that plans faster than one that is found may have as those half way to the bound, from which
on these are gone through first: the time of what they give leaves out most of the others."""

MANY = 30_000
"""Segments from which on closer prices are looked for: fewer are gone through in less time than that takes."""

NEAR_ENOUGH = 1.1
"""Ratio of a plan's time to the bound up to which it is taken where fewer labels are asked for."""


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
        self.peak, self.time = peak, time
        self.segments = Segments(int(j[-1]), i, j, limit, kept, seconds)

    def fastest(
        self, labels: int, slack: Sequence[float] = SLACK, prices: Seconds | None = None
    ) -> tuple[list[tuple[int, int]], Seconds]:
        """The fastest plan, with so many labels in all: the number of each segment and the bytes kept before it.

        And prices that are good for it, to be given for another peak, as they are good for that too.
        """
        guide = at_the_end(self.segments, self.peak)
        if prices is not None:
            guide = max(guide, Priced(self.segments, prices), key=lambda priced: priced.bound)
        bound, longest = max(0.0, guide.bound), float(self.segments.seconds.max())
        enough = 1.0 if labels >= LABELS else NEAR_ENOUGH
        best: list[tuple[int, int]] = []
        for share in slack:
            within = bound + share * (bound + longest / 100)
            if within >= guide.bound:
                best, fastest, guide = self._fastest_within(guide, within, labels)
            if best:
                break
        last = within
        # Where a plan is found, nothing slower is of interest. It may be far from the fastest one.
        middle = (max(bound, guide.bound) + fastest) / 2
        is_less = HALFWAY * float((guide.through <= middle).sum()) < (guide.through <= fastest).sum()
        for within in (middle, np.inf) if is_less else (np.inf,):
            if fastest <= last * enough:
                break
            last = min(within, fastest)
            path, seconds, guide = self._fastest_within(guide, last, labels)
            if seconds < fastest:
                best, fastest = path, seconds
        return best, guide.sums

    def _fastest_within(self, guide: Priced, within: float, labels: int) -> tuple[list[tuple[int, int]], float, Priced]:
        """The fastest plan of those that prices give so many seconds, if there is one, its time, and better prices."""
        numbers = np.flatnonzero(guide.through <= within)
        closer = Priced(self.segments.of(numbers), guide.sums)
        if len(numbers) > MANY and within < np.inf:
            closer = raised(closer, within)
            guide = Priced(self.segments, closer.sums)
            few = np.flatnonzero(closer.through <= within)
            numbers = numbers[few]
            closer = Priced(closer.segments.of(few), closer.sums)
        if not len(numbers) or closer.bound > within:
            return [], np.inf, guide
        path, seconds = self._labelled(closer, numbers, within, labels)
        return path, seconds, guide

    def _labelled(
        self, guide: Priced, numbers: Ints, within: float, labels: int
    ) -> tuple[list[tuple[int, int]], float]:
        """The fastest plan of segments of these numbers that the guide gives so many seconds, and its time."""
        segments, last = guide.segments, guide.segments.last
        count = max(8, labels // (last + 1))
        kept = np.full((last + 1, count), NEVER)
        seconds = np.full(kept.shape, np.inf)
        parents = np.zeros((*kept.shape, 2), np.int64)  # a segment, and the label that it starts from
        costs = np.full(kept.shape, np.inf)  # seconds and the price of the bytes
        kept[0, 0], seconds[0, 0], costs[0, 0] = 0, 0.0, 0.0
        least_kept, least_costs = kept[:, 0].copy(), costs[:, 0].copy()  # of the labels at each cut
        # What is left for what comes before each segment, if the segment takes as little time as it may.
        left = within - guide.costs - guide.rest[segments.j]
        for j, first, stop in segments.by_end:
            here = np.arange(first, stop)
            i = segments.i[here]
            some = (least_kept[i] <= segments.limit[here]) & (least_costs[i] <= left[here])
            here, i = here[some], i[some]
            fits = kept[i] <= segments.limit[here, None]
            fits &= costs[i] <= left[here, None]
            row, parent = np.nonzero(fits)
            if not len(row):
                continue
            segment, start = here[row], i[row] * count + parent
            before = kept.reshape(-1)[start]
            after = before + segments.kept[segment]
            taken = seconds.reshape(-1)[start] + self.time(numbers[segment], before)
            estimates = taken + guide.price[j] * after + guide.rest[j]
            # What is slower at the end shows the time within which there is a plan.
            promising = np.flatnonzero(estimates <= (within if j < last else np.inf))
            front = promising[_front(after[promising], taken[promising])]
            best = front[_thinned(estimates[front], count)]
            after, taken = after[best], taken[best]
            kept[j, : len(best)], seconds[j, : len(best)] = after, taken
            costs[j, : len(best)] = taken + guide.price[j] * after
            parents[j, : len(best)] = np.stack([segment[best], parent[best]], 1)
            least_kept[j], least_costs[j] = kept[j].min(), costs[j].min()
        return _path(segments, numbers, kept, parents, int(seconds[-1].argmin())), float(seconds[-1].min())


def _path(segments: Segments, numbers: Ints, kept: Ints, parents: Ints, label: int) -> list[tuple[int, int]]:
    """The number of each segment of a label at the end, and the bytes kept before it; nothing if there is none."""
    path: list[tuple[int, int]] = []
    cut = segments.last if kept[-1, label] < NEVER else 0
    while cut > 0:
        segment, label = (int(n) for n in parents[cut, label])
        cut = int(segments.i[segment])
        path.append((int(numbers[segment]), int(kept[cut, label])))
    return path[::-1]


BINS = 1024
"""Ranges of bytes in which labels are compared roughly first: several times more than labels of a front."""


def _front(kept: Ints, seconds: Seconds) -> NDArray[np.intp]:
    """Indices of labels that no other beats in both, by ascending bytes."""
    if len(kept) > BINS:  # a sort of all would take several times as long
        some = _unbeaten(kept, seconds)
        return some[_front(kept[some], seconds[some])] if len(some) < len(kept) else _sorted_front(kept, seconds)
    return _sorted_front(kept, seconds)


def _unbeaten(kept: Ints, seconds: Seconds) -> NDArray[np.intp]:
    """Indices of labels as fast as none in bins of fewer bytes: the front, and a few more."""
    least = int(kept.min())
    bins = (kept - least) // (1 + (int(kept.max()) - least) // BINS)
    fastest = np.full(BINS + 2, np.inf)
    np.minimum.at(fastest, bins + 1, seconds)
    return np.flatnonzero(seconds < np.minimum.accumulate(fastest)[bins])


def _sorted_front(kept: Ints, seconds: Seconds) -> NDArray[np.intp]:
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

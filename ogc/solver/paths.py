"""The fastest path through the cuts of a program within so many bytes, by label setting under prices of bytes.

Labels (Hansen, "Bicriterion path problems", 1980; Martins, "On a multicriteria shortest path problem", 1984) are plans
up to a cut: the bytes they keep and the time they recompute. Vertices are cuts, edges segments. At each cut those stay
that no other beats in both, its front. A Lagrangian relaxation bounds what follows a label, and from both ends it tells
which segments no plan within a given time has: first those of plans near the bound are looked at, then slower ones
until there is a plan, then all that are faster than that.

A segment (i, j) may be taken with at most limit(i, j) bytes kept before it. Instead, every cut c gets a price
λ(c) >= 0, and the segment over it pays λ(c) (K(i) - limit(i, j)), which no plan that fits pays more than nothing for.
What a byte kept by a segment costs is then the sum of all prices behind it, so that each segment has one cost,

    cost(i, j) = seconds - limit (Λ(j) - Λ(i)) + kept (Λ(C) - Λ(j)),     Λ(j) = λ(1) + ... + λ(j),

and the cheapest plan, a shortest path, bounds the time of every plan that fits (Handler & Zang, "A dual algorithm for
the constrained shortest path problem", 1980; Beasley & Christofides, "An algorithm for the resource constrained
shortest path problem", 1989, who leave out edges by such bounds too). One price, at the end, is found by a secant, as
the bound is a concave function of it; from there, prices at all cuts by subgradients with Polyak's steps (Held, Wolfe &
Crowder, "Validation of subgradient optimization", 1974). Where late segments need many bytes to be recomputed, which
one price at the end does not see, these bounds are several times closer.

Complexity for W segments and C cuts: O(W + C) array steps for the bound at given prices, O(W F) for fronts of F labels.
Exact while no front exceeds F; else the F labels stay that promise most: the plan fits, but may recompute more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .costs import NEVER, Ints

Seconds = NDArray[np.float64]

TimeOfSegments = Callable[[Ints, Ints], Seconds]
"""From the numbers of segments and the bytes kept before each."""

LABELS = 30_000
"""Labels that are kept over all cuts; a cut whose share is exceeded thins its front."""

SLACK = (0.004, 0.012, 0.04, 0.07, 0.12, 0.4, np.inf)
"""Shares of the bound, and of a hundredth of the longest segment's time, by which a plan may exceed the bound: tried in
turn until there is a plan."""

HALFWAY = 1.5
"""Times as many segments as those half way to the bound from which on these are gone through first: the time of what
they give leaves out most of the others."""

MANY = 30_000
"""Segments from which on closer prices are worth their time."""

NEAR_ENOUGH = 1.1
"""Ratio of a plan's time to the bound up to which it is taken where fewer labels are asked for."""

PRICES, CLOSE = 12, 3e-3
"""Prices at the end that are tried at most, and the share of the best bound that may be missing: below ``SLACK``."""

STEPS, PATIENCE, SHORTER, SHORTEST = 60, 4, 0.6, 0.05
"""Steps of subgradients at most, those without a better bound until steps get shorter, by which factor, and when they
are too short to help."""


@dataclass(frozen=True)
class Segments:
    """Segments between cuts, by ascending end: the fields are those of :class:`ogc.solver.paths.ConstrainedPaths`."""

    last: int
    i: Ints
    j: Ints
    limit: Ints
    kept: Ints
    seconds: Seconds

    def of(self, numbers: Ints) -> Segments:
        """Those of these ascending numbers."""
        i, j, limit, kept = (each[numbers] for each in (self.i, self.j, self.limit, self.kept))
        return Segments(self.last, i, j, limit, kept, self.seconds[numbers])

    @cached_property
    def bytes(self) -> tuple[Seconds, Seconds]:
        """``limit`` and ``kept`` as they are multiplied with prices."""
        return self.limit.astype(np.float64), self.kept.astype(np.float64)

    @cached_property
    def by_end(self) -> list[tuple[int, int, int]]:
        """Each cut at which a segment ends, and the first and last number of those, by ascending cut."""
        return _groups(np.searchsorted(self.j, np.arange(self.last + 2)))

    @cached_property
    def by_start(self) -> tuple[Ints, Ints, list[tuple[int, int, int]]]:
        """The numbers in the order of starts, their ends, and each cut at which a segment starts with its places."""
        order = np.argsort(self.i.astype(np.uint16), kind="stable")  # a radix sort, for there are few cuts
        return order, self.j[order], _groups(np.cumsum([0, *np.bincount(self.i, minlength=self.last)]))


class Priced:
    """Segments at the prices ``sums`` (Λ, seconds per byte) of bytes at each cut."""

    def __init__(self, segments: Segments, sums: Seconds) -> None:
        self.segments, self.sums = segments, sums
        self.price = sums[-1] - sums  # of a byte kept at each cut
        limit, kept = segments.bytes
        paid = sums[segments.j]
        self.costs = (sums[-1] - paid) * kept
        paid -= sums[segments.i]
        paid *= limit
        self.costs -= paid
        self.costs += segments.seconds

    @cached_property
    def rest(self) -> Seconds:
        """What the program costs from each cut on, at least."""
        order, ends, groups = self.segments.by_start
        costs = self.costs[order]
        rest = np.full(self.segments.last + 1, np.inf)
        rest[-1] = 0.0
        for i, first, stop in reversed(groups):
            rest[i] = (costs[first:stop] + rest[ends[first:stop]]).min()
        return rest

    @property
    def bound(self) -> float:
        """Seconds that no plan that fits is below."""
        return float(self.rest[0])

    @cached_property
    def through(self) -> Seconds:
        """For each segment, the time that no plan with it is below."""
        return self.cheapest[0][self.segments.i] + self.costs + self.rest[self.segments.j]

    @cached_property
    def cheapest(self) -> tuple[Seconds, Ints]:
        """What the program costs up to each cut, at least, and the segments of the cheapest plan, in order."""
        starts, costs = self.segments.i, self.costs
        before = np.full(self.segments.last + 1, np.inf)
        before[0] = 0.0
        choices = [-1] * (self.segments.last + 1)
        for j, first, stop in self.segments.by_end:
            totals = before[starts[first:stop]] + costs[first:stop]
            best = int(totals.argmin())
            choices[j], before[j] = first + best, totals[best]
        path, cut = [], self.segments.last
        while cut > 0 and choices[cut] >= 0:
            path.append(choices[cut])
            cut = int(starts[choices[cut]])
        return before, np.array(path[::-1], np.int64)

    def excess(self) -> Seconds:
        """For each cut, the bytes by which the cheapest plan is above the limit of the segment over it."""
        path, found = self.cheapest[1], np.zeros(self.segments.last + 1)
        kept = self.segments.kept[path]
        over = np.cumsum(kept) - kept - self.segments.limit[path]
        found[1:] = np.repeat(over, self.segments.j[path] - self.segments.i[path])
        return found


def at_the_end(segments: Segments, peak: int) -> Priced:
    """The price of bytes at the end for which the bound is best, about.

    What the cheapest plan costs is a line over the prices, and no plan is cheaper than that anywhere. Of a plan
    that is too large it rises, of one that fits it falls: the best price is near where they meet.
    """

    def at(price: float) -> tuple[Priced, float, float]:
        """With the excess in bytes and the seconds of the cheapest plan."""
        priced = Priced(segments, np.append(np.zeros(segments.last), price))
        bytes_ = float(priced.excess()[-1])
        return priced, bytes_, float(priced.cheapest[0][-1]) - price * bytes_

    def bound(found: tuple[Priced, float, float]) -> float:
        return float(found[0].cheapest[0][-1])

    unit = (float(segments.seconds.max()) or 1.0) / max(1, peak)
    large, fits = at(1e-5 * unit), at(1e5 * unit)
    best = max(large, fits, key=bound)
    for _ in range(PRICES):
        if not fits[1] <= 0 < large[1]:
            break
        price = (fits[2] - large[2]) / (large[1] - fits[1])
        found = at(price)
        best = max(best, found, key=bound)
        if bound(found) >= (1 - CLOSE) * (fits[2] + price * fits[1]):
            break
        large, fits = (found, fits) if found[1] > 0 else (large, found)
    return best[0]


def raised(priced: Priced, within: float) -> Priced:
    """Prices at all cuts at which the bound is better, up to ``within`` seconds."""
    best, length, failed = priced, 1.0, 0
    bound, here = float(priced.cheapest[0][-1]), priced
    for _ in range(STEPS):
        prices = np.diff(here.sums, prepend=0.0)
        excess = here.excess()
        excess[(prices <= 0) & (excess < 0)] = 0.0
        square = float(excess @ excess)
        if bound > within or not square or length < SHORTEST:
            break
        step = length * (within - float(here.cheapest[0][-1])) / square
        here = Priced(here.segments, np.cumsum(np.maximum(prices + step * excess, 0.0)))
        reached = float(here.cheapest[0][-1])
        failed = 0 if reached > bound else failed + 1
        if not failed:
            best, bound = here, reached
        elif failed > PATIENCE:
            here, length, failed = best, length * SHORTER, 0
    return best


def _groups(edges: Ints) -> list[tuple[int, int, int]]:
    return [(cut, *span) for cut, span in enumerate(pairwise(edges.tolist())) if span[0] < span[1]]


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
        best: list[tuple[int, int]] = []
        for share in slack:
            within = bound + share * (bound + longest / 100)
            if within >= guide.bound:
                best, fastest, guide = self._fastest_within(guide, within, labels)
            if best:
                break
        last, enough = within, 1.0 if labels >= LABELS else NEAR_ENOUGH
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
        used = np.ones(last + 1, np.int64)  # so many of them are not empty
        # What is left for what comes before each segment, if the segment takes as little time as it may.
        left = within - guide.costs - guide.rest[segments.j]
        for j, first, stop in segments.by_end:
            here = np.arange(first, stop)
            i = segments.i[here]
            some = (least_kept[i] <= segments.limit[here]) & (least_costs[i] <= left[here])
            here, i = here[some], i[some]
            most = int(used[i].max(initial=0))
            fits = kept[i, :most] <= segments.limit[here, None]
            fits &= costs[i, :most] <= left[here, None]
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
            least_kept[j], least_costs[j], used[j] = kept[j, 0], costs[j, : max(1, len(best))].min(), len(best)
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

"""Prices of bytes: bounds on the time of plans within so many bytes, by Lagrangian relaxation.

A segment (i, j) may be taken with at most limit(i, j) bytes kept before it. Instead, every cut c gets a price
λ(c) >= 0, and the segment over it pays λ(c) (K(i) - limit(i, j)), which no plan that fits pays more than nothing for.
What a byte kept by a segment costs is then the sum of all prices behind it, so that each segment has one cost,

    cost(i, j) = seconds - limit (Λ(j) - Λ(i)) + kept (Λ(C) - Λ(j)),     Λ(j) = λ(1) + ... + λ(j),

and the cheapest plan, a shortest path, bounds the time of every plan that fits (Handler & Zang, "A dual algorithm for
the constrained shortest path problem", 1980; Beasley & Christofides, "An algorithm for the resource constrained
shortest path problem", 1989, who leave out edges by such bounds too). One price, at the end, is found by a secant, as
the bound is a concave function of it; from there, prices at all cuts by subgradients with Polyak's steps (Held, Wolfe &
Crowder, "Validation of subgradient optimization", 1974). Where late segments need many bytes to run again, which one
price at the end does not see, these bounds are several times closer.

Complexity for W segments and C cuts: O(W + C) array steps for the bound at given prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..costs import Ints

Seconds = NDArray[np.float64]

PRICES = 12
CLOSE = 3e-3
"""Prices at the end that are tried at most, and the share of the best bound that may be missing: less than the first of
``SLACK``, so that a closer price would not change which segments are looked at."""

STEPS = 60
"""Steps of subgradients at most: of transformers, two thirds of what is missing of the bound is found in as many."""

PATIENCE = 4
SHORTER = 0.6
SHORTEST = 0.05
"""Steps without a better bound after which steps get shorter, by which factor, and when they are too short to help."""


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

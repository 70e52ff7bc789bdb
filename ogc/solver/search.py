"""Puts the exact outermost level and the nested tables together: one search per graph, many questions.

Every answer is weighed by the simulator before it is given, so that what the tables round against a plan,
or count for a boundary that nobody needs, is not lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from tqdm import tqdm

from ..graph import Graph
from ..plan import Segment
from .costs import Ints, boundary_bytes, segment_costs
from .interval import OuterLevel
from .nested import NestedTable
from .simulate import operation_bounds, simulate

MAX_CUTS = 120
"""Cuts that nested plans may use; the outermost level may use all."""

MAX_CELLS = 3_000_000
MIN_CUTS = 250
"""Cuts times operations that are weighed, if there are more cuts than the least number; longer programs are cut
only at their narrowest places.

With one cut per stretch of s operations, the peak of a plan exceeds that with all cuts by at most what one
stretch holds when it is run again.
"""

LEVELS = 256
"""Units into which the bytes at hand are divided in a nested table."""

ROUGH_LEVELS = 96
ROUGH_LABELS = 4_000
"""The same, and the labels of the outermost level, where only a first idea is needed."""

ROUNDS = 6
"""Times that the least peak is looked for again with finer units."""

STEP = 1.4
"""A table serves peaks down to this many times less than it was made for."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A plan with its simulated peak and recomputed time."""

    peak_bytes: int
    seconds: float
    segments: tuple[Segment, ...]


class Search:
    """Interval and nested plans over one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.cuts = _narrow_cuts(graph)
        self.costs, self.nested_costs = segment_costs(graph, self.cuts)
        self.flat = OuterLevel(self.costs)
        self.levels: dict[tuple[int, int], OuterLevel] = {}  # by the peak and the units they were made for
        self.seen: dict[tuple[Segment, ...], Candidate] = {}

    def least_peak(self) -> Candidate:
        """The plan with the least simulated peak, and the fastest of those."""
        best = self._weigh(self.flat.fastest(self.flat_peak))
        for _ in range(ROUNDS):
            level = self._level(best.peak_bytes, ROUGH_LEVELS)
            found = self._weigh(level.fastest(level.least_peak()))
            gain = 1 - found.peak_bytes / best.peak_bytes
            best = min(best, found)
            if gain < 0.02:
                break
        level = self._level(best.peak_bytes, LEVELS)
        return min(best, self._weigh(level.fastest(level.least_peak())))

    def fastest(self, peak: int) -> Candidate | None:
        """The fastest plan found whose simulated peak is at most ``peak`` bytes."""
        found = [c for c in self._around(peak) if c.peak_bytes <= peak]
        return min(found, key=lambda c: (c.seconds, c.peak_bytes), default=None)

    def within(self, seconds: float) -> Candidate | None:
        """The plan found with the least simulated peak of those that recompute for at most ``seconds``."""
        low, high = self.least_peak().peak_bytes, int(self.flat.local[0, 0, -1])
        found = [self._weigh((Segment(0, len(self.graph)),)), *self._at(low)]
        for _ in range(9):
            middle = int(np.sqrt(float(low) * high))
            here = list(self._at(middle))
            found += here
            if any(c.seconds <= seconds for c in here):
                high = middle
            else:
                low = middle
        return min((c for c in (*found, *self.seen.values()) if c.seconds <= seconds), default=None)

    def curve(self, points: int) -> list[Candidate]:
        """Plans from the least peak to the saved model, each faster and larger than the one before."""
        lowest = self.least_peak()
        highest = int(self.flat.local[0, 0, -1])
        peaks = np.geomspace(highest, lowest.peak_bytes, points)[1:-1]  # descending: a table serves those below
        for peak in tqdm(peaks, "frontier", delay=1, leave=False):
            segments = self._level(int(peak)).find(int(peak), ROUGH_LABELS)
            if segments is not None:
                self._weigh(segments)
        self._weigh((Segment(0, len(self.graph)),))
        front: list[Candidate] = []
        for candidate in sorted(self.seen.values()):
            if not front or candidate.seconds < front[-1].seconds:
                front.append(candidate)
        return front

    def _around(self, peak: int) -> Iterator[Candidate]:
        """Plans for ``peak`` and a little more, which the simulator may find to fit after all."""
        for share in (1.07, 1.03, 1.01, 1.0):
            yield from self._at(int(peak * share))

    def _at(self, peak: int) -> Iterator[Candidate]:
        """The fastest plans for ``peak``, flat and nested."""
        for level in (self.flat, self._level(peak)):
            segments = level.find(peak)
            if segments is not None:
                yield self._weigh(segments)

    def _weigh(self, segments: tuple[Segment, ...]) -> Candidate:
        if segments not in self.seen:
            cost = simulate(self.graph, segments)
            self.seen[segments] = Candidate(cost.peak_bytes, cost.recomputed_seconds, segments)
        return self.seen[segments]

    @cached_property
    def flat_peak(self) -> int:
        """The least peak of plans without nesting."""
        return self.flat.least_peak()

    def _level(self, peak: int, levels: int = LEVELS) -> OuterLevel:
        """The outermost level over nested plans, with a table whose range is right for ``peak``."""
        for (top, units), level in self.levels.items():
            if top / STEP <= peak <= top and units >= levels:
                return level
        table = NestedTable(self.nested_costs.at(self._chosen), peak, levels)
        self.levels[peak, levels] = OuterLevel(self.costs.at(self._chosen), table)
        return self.levels[peak, levels]

    @cached_property
    def _chosen(self) -> Ints:
        """Indices of cuts for nested plans: those of good flat plans, those around operations that need the
        most by themselves, and the narrowest places in between."""
        cuts = self.costs.cuts
        if len(cuts) <= MAX_CUTS:
            return np.arange(len(cuts))
        needs = np.array(operation_bounds(self.graph))
        hot: set[int] = set()
        for t in np.argsort(-needs, kind="stable"):
            place = int(np.searchsorted(cuts, t, side="right"))
            hot.update(range(max(0, place - 2), min(len(cuts), place + 2)))
            if len(hot) > MAX_CUTS // 3:
                break
        wanted = {0, len(cuts) - 1} | hot
        for share in (1.0, 2.0):
            good = self.flat.fastest(int(self.flat_peak * share), labels=ROUGH_LABELS)
            stops = [segment.stop for segment in good]
            wanted.update(int(k) for k in np.searchsorted(cuts, stops))
        spans = np.linspace(0, len(cuts), MAX_CUTS // 3).astype(int)
        wanted.update(a + int(np.argmin(self._widths[a:b])) for a, b in pairwise(spans))
        return self._thin(sorted(wanted), hot)

    def _thin(self, chosen: list[int], hot: set[int]) -> Ints:
        """Drop cuts until there are few enough: those that save little time to have, for their width."""
        seconds = np.cumsum([0.0, *(op.forward_seconds for op in self.graph.operations)])[self.costs.cuts]
        while len(chosen) > MAX_CUTS:
            kept = np.array(chosen)
            worth = (seconds[kept[2:]] - seconds[kept[:-2]]) / (1 + self._widths[kept[1:-1]])
            worth[np.isin(kept[1:-1], list(hot))] = np.inf
            del chosen[1 + int(np.argmin(worth))]
        return np.array(chosen)

    @cached_property
    def _widths(self) -> Ints:
        """Bytes of the boundary of each cut."""
        return boundary_bytes(self.graph)[self.costs.cuts]


def _narrow_cuts(graph: Graph) -> list[int]:
    """The cuts that plans may use: all, or in a long program the narrowest of each stretch."""
    cuts = np.array(graph.cuts)
    most = max(MIN_CUTS, MAX_CELLS // max(1, len(graph)))
    if len(cuts) <= most:
        return list(graph.cuts)
    widths = boundary_bytes(graph)[cuts]
    edges = np.linspace(1, len(cuts) - 1, most).astype(int)
    inner = [int(cuts[a + np.argmin(widths[a:b])]) for a, b in pairwise(edges)]
    return [0, *inner, len(graph)]

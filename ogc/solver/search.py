"""Puts the exact outermost level and the nested tables together: one search per graph, many questions.

Every answer is weighed by the simulator before it is given, so that what the tables round against a plan,
or count for a boundary that nobody needs, is not lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise, product

import numpy as np
from tqdm import tqdm

from ..errors import PlanError
from ..graph import Graph
from ..plan.decisions import Decisions, Segment, cut_into_segments, recomputed, saved
from ..plan.simulate import lower_bound, simulate
from .costs import Costs, SegmentCosts
from .fronts import LABELS, SLACK
from .interval import OuterLevel
from .keeping import worth_keeping
from .nested import NestedTable
from .scales import choose_scales, narrowest

MAX_CUTS = 800
MAX_CELLS = 3_000_000
MIN_CUTS = 250
"""Cuts that are weighed, cuts times operations, and cuts that are weighed however many operations there are: the time
for a plan is quadratic in the cuts, the memory linear in both. Longer programs are cut at their narrowest places.

With one cut per stretch of s operations, the peak of a plan exceeds that with all cuts by at most what one
stretch holds when it is run again.
"""

LEVELS = 160
"""Units into which the bytes at hand are divided in a nested table."""

FINE_LEVELS = 320
"""The same for the least peak, which is the larger by what is rounded."""

ROUGH_LEVELS = 48
ROUGH_LABELS = 20_000
"""The same, and the labels of the outermost level, where only a first idea is needed."""

ROUGH = 0.02
"""By how much of itself a first idea of the least peak may be too large."""

POLISHING = 2_000_000
"""Over the square of the number of operations: how often the simulator is asked for values and cuts better lost than
kept. The gain falls with the size of the graph, as the time for each answer grows. With much less of it, the least
peak of a network of a hundred operations varies by some percent with the measured times.
"""

FINEST = 60_000
"""The same for the plan that remakes every value, and what of it is kept after all. In a larger graph it would take
many steps' time for little less memory.
"""

KEEPING = 600
"""Operations up to which segments that keep values are tried for the least peak too. Single operations bound that in
small programs, so that there are bytes to spare elsewhere.
"""

SELECTIVE_SHARES = tuple(1 - np.geomspace(0.7, 0.005, 12))
"""How much of the program's time the values make up that selective plans keep: closer where little is made again."""

PARTS = 200
"""Segments of a selective plan at most: each looks at what comes before it."""

SELECTING = 10_000
"""Operations up to which selective plans are tried."""

STEP = 1.4
"""A table serves peaks down to this many times less than it was made for."""


@dataclass(frozen=True, order=True)
class Candidate:
    """Decisions with their simulated peak, the time and FLOPs recomputed, and the values alive at the peak."""

    peak_bytes: int
    seconds: float
    decisions: Decisions
    flops: int = 0
    peak_values: tuple[int, ...] = field(default=(), compare=False)


def weigh(graph: Graph, decisions: Decisions) -> Candidate:
    """What the simulator says of the decisions.

    Raises:
        PlanError: as :func:`ogc.simulate` does.
    """
    cost = simulate(graph, decisions)
    return Candidate(cost.peak_bytes, cost.recomputed_seconds, decisions, cost.recomputed_flops, cost.peak_values)


class Search:
    """Interval and nested plans over one graph.

    Args:
        graph: the weighted graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.weights = SegmentCosts(graph, _cuts(graph))
        self.scales = choose_scales(graph, self.weights.cuts)
        self.tables: dict[tuple[int, int], NestedTable] = {}  # by the peak and the units they were made for
        self.level: OuterLevel | None = None  # the last one that was asked for: each takes memory
        self.seen: dict[tuple[Segment, ...], Candidate] = {}

    @cached_property
    def least_peak(self) -> Candidate:
        """The plan with the least peak, and the fastest of those."""
        self.tables.clear()  # or what was asked before would decide how it is rounded
        bound = lower_bound(self.graph) - 1
        costs = self.weights.costs()
        few = costs.between(self.scales[:2][-1].chosen)
        flat = OuterLevel(few).least_peak(above=bound, tolerance=ROUGH)
        rough = OuterLevel(costs, self._table(flat, ROUGH_LEVELS)).least_peak(above=bound, near=flat, tolerance=ROUGH)
        level = OuterLevel(costs, self._table(rough, FINE_LEVELS))
        least = level.least_peak(above=bound, near=rough)
        # So few plans fit that the fastest is seldom near the bound: do not start with those that are.
        best = self._finest(self._polished(self._weigh(level.fastest(least, ROUGH_LABELS, SLACK[2:]))))
        if len(self.graph) > KEEPING:
            return best
        return min(best, self._at(best.peak_bytes) or best)

    def fastest(self, peak: int) -> Candidate | None:
        """The fastest plan found whose simulated peak is at most ``peak`` bytes."""
        # The simulator may find that plans for a little more fit after all.
        tried = [self._at(int(peak * share)) for share in (1.07, 1.03, 1.01, 1.0)]
        found = [c for c in tried if c is not None and c.peak_bytes <= peak]
        if not found and self.least_peak.peak_bytes <= peak:
            return self.least_peak
        return min(found, key=lambda c: (c.seconds, c.peak_bytes), default=None)

    def within(self, seconds: float) -> Candidate | None:
        """The plan found with the least simulated peak of those that recompute for at most ``seconds``."""
        low, high = self.least_peak.peak_bytes, self._saved.peak_bytes
        for labels in (ROUGH_LABELS,) * 5 + (LABELS,) * 4:
            middle = int(np.sqrt(float(low) * high))
            here = self._at(middle, labels)
            low, high = (low, middle) if here is not None and here.seconds <= seconds else (middle, high)

        def best() -> Candidate | None:
            return min((c for c in (self.least_peak, *self.seen.values()) if c.seconds <= seconds), default=None)

        found = best()
        if found is not None:
            self._at(found.peak_bytes)  # there may be a faster one for the same bytes
        return best()

    def curve(self, points: int) -> list[Candidate]:
        """Plans from the least peak to the saved model, each faster and larger than the one before."""
        peaks = np.geomspace(self._saved.peak_bytes, self.least_peak.peak_bytes, points)[1:-1]
        for peak in tqdm(peaks, "frontier", delay=1, leave=False):  # descending: a table serves those below
            self._at(int(peak), ROUGH_LABELS)
        # What is a hair below the least peak recomputes the step many times over.
        selective = (c for c in self._selective() if c.peak_bytes > self.least_peak.peak_bytes)
        front: list[Candidate] = []
        for candidate in sorted([self.least_peak, *self.seen.values(), *selective]):
            if not front or candidate.seconds < front[-1].seconds:
                front.append(candidate)
        return front

    @cached_property
    def _saved(self) -> Candidate:
        """The plan that recomputes nothing."""
        return self._weigh((Segment(0, len(self.graph)),))

    def _polished(self, best: Candidate) -> Candidate:
        """The plan without values and cuts that are better made again than kept, as far as the simulator may be asked.

        Of the values alive at its peak and the cuts of its outermost level, the one or else the two whose loss helps
        most go, again and again.
        """
        asked = POLISHING // max(1, len(self.graph)) ** 2
        while asked > 0:
            before = best
            segments, remade = before.decisions.segments, before.decisions.remade
            kept = [v for v in before.peak_values if not self.graph.values[v].is_output and v not in remade]
            kept.sort(key=lambda v: -self.graph.values[v].bytes)
            joined = [
                (*segments[:number], recomputed(first.start, second.stop), *segments[number + 2 :])
                for number, (first, second) in enumerate(pairwise(segments))
            ]
            singles = [*((segments, (v,)) for v in kept), *((others, ()) for others in joined)]
            pairs = [*((segments, two) for two in combinations(kept, 2)), *product(joined, ((v,) for v in kept))]
            for losses in (singles, pairs):
                found = (self._remaking(*loss, before) for loss in losses[:asked])
                best = min((best, *found), key=lambda c: (c.peak_bytes, c.seconds))
                asked -= len(losses)
                if best != before or asked <= 0:
                    break
            if best == before:
                break
        return best

    def _finest(self, best: Candidate) -> Candidate:
        """The plan with less memory, if it is one, that cuts everywhere and remakes every value wherever it is used.

        What that does not take for its peak is kept and saved after all, as far as it takes less time.
        """
        graph = self.graph
        cuts = graph.cuts
        values = [v for v, value in enumerate(graph.values) if not value.is_output]
        if len(cuts) - 1 + len(values) > FINEST // max(1, len(graph)) ** 2:
            return best
        segments = cut_into_segments(cuts, [True] * (len(cuts) - 1))
        try:
            found = weigh(graph, Decisions(segments).remaking(values))
        except PlanError:  # an operation would run twice that must not
            return best
        if found.peak_bytes >= best.peak_bytes:
            return best
        for value in values:
            found = min(found, weigh(graph, found.decisions.leaving(value)))
        for number, segment in enumerate(segments):
            others = list(found.decisions.segments)
            others[number] = saved(segment.start, segment.stop)
            found = min(found, weigh(graph, replace(found.decisions, segments=tuple(others))))
        return found

    def _selective(self) -> Iterator[Candidate]:
        """Plans that keep what is worth it by one threshold and make everything else again wherever it is used.

        The tables only let go of what does not cross a cut. Where much costs next to nothing to make, as when time is
        counted in FLOPs, that holds more than these plans do.
        """
        graph = self.graph
        if len(graph) > SELECTING:
            return
        cuts = graph.cuts[: -1 : -(-len(graph.cuts) // PARTS)] + graph.cuts[-1:]
        for kept in worth_keeping(graph, SELECTIVE_SHARES):
            by_place = sorted(kept, key=graph.producers.__getitem__)
            edges = np.searchsorted([graph.producers[v] for v in by_place], cuts)
            segments = tuple(
                recomputed(start, stop, kept=by_place[first:last])
                for (start, stop), (first, last) in zip(pairwise(cuts), pairwise(edges), strict=True)
            )
            remade = (v for v, value in enumerate(graph.values) if not value.is_output and v not in kept)
            with suppress(PlanError):  # an operation would run twice that must not
                yield weigh(graph, Decisions(segments).remaking(remade))

    def _remaking(self, segments: tuple[Segment, ...], lost: tuple[int, ...], plan: Candidate) -> Candidate:
        """The plan with these segments instead and these values remade too, or the plan itself if that cannot be."""
        try:
            return weigh(self.graph, replace(plan.decisions, segments=segments).remaking(lost))
        except PlanError:  # an operation would run twice that must not
            return plan

    def _at(self, peak: int, labels: int = LABELS) -> Candidate | None:
        """The fastest plan for ``peak``, or None if nothing fits."""
        segments = self._level(peak).find(peak, labels)
        return None if segments is None else self._weigh(segments)

    def _weigh(self, segments: tuple[Segment, ...]) -> Candidate:
        if segments not in self.seen:
            self.seen[segments] = weigh(self.graph, Decisions(segments))
        return self.seen[segments]

    def _level(self, peak: int) -> OuterLevel:
        """The outermost level over nested plans and segments that keep values, with the table for ``peak``."""
        table = self._table(peak)
        if self.level is None or self.level.table is not table:
            self.level = OuterLevel(self._costs, table)
        return self.level

    def _table(self, peak: int, levels: int = LEVELS) -> NestedTable:
        """A table whose range is right for ``peak``."""
        for (top, units), table in self.tables.items():
            if top / STEP <= peak <= top and units >= levels:
                return table
        self.tables[peak, levels] = NestedTable(self.weights.nested, self.scales, peak, levels)
        return self.tables[peak, levels]

    @cached_property
    def _costs(self) -> Costs:
        """The weights of the outermost level with segments that keep values."""
        return self.weights.costs(*worth_keeping(self.graph)).undominated()


def _cuts(graph: Graph) -> list[int]:
    """The cuts that plans may use: all, or in a long program the narrow ones."""
    most = min(MAX_CUTS, max(MIN_CUTS, MAX_CELLS // max(1, len(graph))))
    if len(graph.cuts) <= most:
        return list(graph.cuts)
    found: list[int] = narrowest(graph, np.array(graph.cuts), most).tolist()
    return found

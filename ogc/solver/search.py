"""One search per graph for many questions, with the exact outermost level over nested tables.

The simulator weighs every answer: what tables round, or count for a boundary that nobody needs, is not lost.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from tqdm import tqdm

from ..graph import Graph
from ..plan.decisions import Decisions, Segment
from ..plan.simulate import lower_bound
from .costs import Costs, SegmentCosts
from .cuts import choose_grids, narrowest
from .local_search import Candidate, drop_one_by_one, finest, front_of, weigh
from .nested import NestedTable
from .outer_level import OuterLevel
from .paths import LABELS, NEAR_ENOUGH, SLACK
from .selective import selective, worth_keeping

MAX_CUTS = 800
MAX_CELLS = 3_000_000
MIN_CUTS = 250
"""Cuts that are weighed, cuts times operations, and cuts that are weighed however many operations there are: the time
for a plan is quadratic in the cuts, the memory linear in both. Longer programs are cut where they are narrowest. The
peak of a plan exceeds that with all cuts by at most what the operations from one cut to the next hold when run again.
"""

LEVELS = 160
"""Units into which a nested table divides the bytes at hand. More round less; time and memory grow with them."""

FINE_LEVELS = 320
"""Units of the table for the least peak, which rounding makes larger."""

ROUGH_LEVELS = 48
ROUGH_LABELS = 20_000
"""Units of a table, and labels of the outermost level, where a first idea is enough: several times fewer."""

ROUGH = 0.02
"""Share by which a first idea of the least peak may be too large: about one unit of its table."""

KEPT_VALUES_UP_TO = 600
"""Operations up to which segments that keep values are tried for the least peak too. Single operations bound that in
small programs, so that there are bytes to spare elsewhere."""

STEP = 1.4
"""Ratio of the peak that a table was made for to the least that it serves: its units get coarse for less."""


PEAKS = 8
CLOSE = 0.005
"""Peaks that are tried at most for a time, and the share of one by which the next has to differ."""

WIDE = 1.15
"""Ratio of the peaks left above which a first idea of what a plan takes is enough."""


class Search:
    """Plans over one weighted graph, by the outermost level and nested tables."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.weights = SegmentCosts(graph, _cuts(graph))
        self.grids = choose_grids(graph, self.weights.cuts)
        self.tables: dict[tuple[int, int], NestedTable] = {}  # by the peak and the units they were made for
        self.level: OuterLevel | None = None  # the last one that was asked for: each takes memory
        self.seen: dict[tuple[Segment, ...], Candidate] = {}

    @cached_property
    def least_peak(self) -> Candidate:
        """The plan with the least peak, and the fastest of those."""
        self.tables.clear()  # or what was asked before would decide how it is rounded
        bound = lower_bound(self.graph) - 1
        costs = self.weights.costs()
        flat = OuterLevel(costs.between(self.grids[:2][-1].chosen)).least_peak(above=bound, tolerance=ROUGH)
        rough = OuterLevel(costs, self._table(flat, ROUGH_LEVELS)).least_peak(above=bound, near=flat, tolerance=ROUGH)
        level = OuterLevel(costs, self._table(rough, FINE_LEVELS))
        least = level.least_peak(above=bound, near=rough)
        # So few plans fit that the fastest is seldom near the bound: do not start with those that are.
        segments = level.fastest(least, ROUGH_LABELS, SLACK[2:])
        assert segments is not None
        best = finest(self.graph, drop_one_by_one(self.graph, self._weigh(segments)))
        if len(self.graph) > KEPT_VALUES_UP_TO:
            return best
        return min(best, self._at(best.peak_bytes) or best)

    def fastest(self, peak: int) -> Candidate | None:
        """The fastest plan found whose simulated peak is at most ``peak`` bytes."""
        # The simulator may find that plans for a little more fit after all.
        less = 0.0  # share of what was asked for that the simulator finds
        for share in (1.07, 1.03, 1.01, 1.0):
            if share > 1.0 and share * less > 1 + CLOSE:
                continue
            here = self._at(int(peak * share))
            if here is not None and here.peak_bytes <= peak:
                return here
            less = less if here is None else here.peak_bytes / (peak * share)
        return self.least_peak if self.least_peak.peak_bytes <= peak else None

    def within(self, seconds: float) -> Candidate | None:
        """The plan found with the least simulated peak of those that recompute for at most ``seconds``."""
        low, high = (self.least_peak.peak_bytes, self.least_peak.seconds), (self._saved.peak_bytes, self._saved.seconds)
        halve = True
        for number in range(1 + PEAKS):
            least, most, before = (1 + CLOSE) * low[0], (1 - CLOSE) * high[0], high[0] / low[0]
            if least > most:
                break
            guess = np.sqrt(float(low[0]) * high[0]) if halve else _between(low, high, seconds, number)
            middle = int(min(max(guess, least), most))
            here = self._at(middle, ROUGH_LABELS if before > WIDE else LABELS)
            if before > WIDE and here is not None and seconds < here.seconds <= NEAR_ENOUGH * seconds:
                here = self._at(middle)  # it may fit after all
            if here is not None and here.seconds <= seconds:
                high = min(middle, here.peak_bytes), here.seconds
            else:
                low = middle, low[1] if here is None else here.seconds
            # Near the end one of both ends hardly moves: if the last step has not halved what is left, the next does.
            halve = not halve and (high[0] / low[0]) ** 2 > before

        def best() -> Candidate | None:
            return min((c for c in (self.least_peak, *self.seen.values()) if c.seconds <= seconds), default=None)

        if (found := best()) is not None and found.peak_bytes > low[0]:
            self._at(found.peak_bytes)  # there may be a faster one for the same bytes
        return best()

    def curve(self, points: int) -> list[Candidate]:
        """Plans from the least peak to the saved model, each faster and larger than the one before."""
        peaks = np.geomspace(self._saved.peak_bytes, self.least_peak.peak_bytes, points)[1:-1]
        for peak in tqdm(peaks, "frontier", delay=1, leave=False):  # descending: a table serves those below
            self._at(int(peak), ROUGH_LABELS)
        # What is a hair below the least peak recomputes the step many times over.
        found = (c for c in selective(self.graph) if c.peak_bytes > self.least_peak.peak_bytes)
        return front_of([self.least_peak, *self.seen.values(), *found])

    @cached_property
    def _saved(self) -> Candidate:
        """The plan that recomputes nothing."""
        return self._weigh((Segment(0, len(self.graph)),))

    def _at(self, peak: int, labels: int = LABELS) -> Candidate | None:
        """The fastest plan for ``peak``, or None if nothing fits."""
        segments = self._level(peak).fastest(peak, labels)
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
        self.tables[peak, levels] = NestedTable(self.weights.nested, self.grids, peak, levels)
        return self.tables[peak, levels]

    @cached_property
    def _costs(self) -> Costs:
        """The weights of the outermost level with segments that keep values."""
        return self.weights.costs(*worth_keeping(self.graph)).undominated()


def _between(low: tuple[int, float], high: tuple[int, float], seconds: float, number: int) -> float:
    """A peak between two, about where a plan takes so many seconds, from the peaks and what plans for them take.

    Between a line and a power law, which take turns by the ``number`` of the guess: one is above what plans take where
    the other is below, so that both ends move.
    """
    (small, slow), (large, fast) = low, high
    if slow <= fast:
        return float(large)
    if number % 2 and 0 < fast < seconds:
        return float(large * (small / large) ** (np.log(seconds / fast) / np.log(slow / fast)))
    return large - (large - small) * (seconds - fast) / (slow - fast)


def _cuts(graph: Graph) -> list[int]:
    """The cuts that plans may use: all, or in a long program the narrow ones."""
    most = min(MAX_CUTS, max(MIN_CUTS, MAX_CELLS // max(1, len(graph))))
    return list(graph.cuts) if len(graph.cuts) <= most else narrowest(graph, np.array(graph.cuts), most)

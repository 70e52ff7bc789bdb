"""Plans between one set of cuts: the exact outermost level over nested tables, made when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ..graph import Graph
from ..plan.decisions import Segment
from .costs import Costs, Ints, SegmentCosts
from .cuts import choose_grids
from .nested import NestedTable
from .outer_level import OuterLevel
from .paths import SLACK
from .selective import worth_keeping

LEVELS = 160
"""Units into which a nested table divides the bytes at hand. More round less; time and memory grow with them."""

FINE_LEVELS = 320
"""Units of the table for the least peak, which rounding makes larger."""

ROUGH_LEVELS = 48
ROUGH_LABELS = 20_000
"""Units of a table, and labels of the outermost level, where a first idea is enough: several times fewer."""

ROUGH = 0.02
"""Share by which a first idea of the least peak may be too large: about one unit of its table."""

STEP = 1.4
"""Ratio of the peak that a table was made for to the least that it serves: its units get coarse for less."""


class CutSearch:
    """Plans of a graph between ``cuts``, positions of which the first and the last are the ends of the program."""

    def __init__(self, graph: Graph, cuts: Sequence[int]) -> None:
        self.graph = graph
        self.weights = SegmentCosts(graph, cuts)
        self.grids = choose_grids(graph, self.cuts)
        self.tables: dict[tuple[int, int], NestedTable] = {}  # by the peak and the units they were made for
        self.level: OuterLevel | None = None  # the last one that was asked for: each takes memory

    @property
    def cuts(self) -> Ints:
        """The positions."""
        return self.weights.cuts

    def least_peak(self, above: int) -> tuple[Segment, ...]:
        """A plan with the least peak, where none peaks at ``above`` bytes."""
        self.tables.clear()  # or what was asked before would decide how it is rounded
        costs = self.weights.costs()
        flat = OuterLevel(costs.between(self.grids[:2][-1].chosen)).least_peak(above=above, tolerance=ROUGH)
        rough = OuterLevel(costs, self._table(flat, ROUGH_LEVELS)).least_peak(above=above, near=flat, tolerance=ROUGH)
        level = OuterLevel(costs, self._table(rough, FINE_LEVELS))
        least = level.least_peak(above=above, near=rough)
        # So few plans fit that the fastest is seldom near the bound: do not start with those that are.
        segments = level.fastest(least, ROUGH_LABELS, SLACK[2:])
        assert segments is not None
        return segments

    def fastest(self, peak: int, labels: int) -> tuple[Segment, ...] | None:
        """The fastest plan for ``peak`` bytes, with so many labels in all, or None if nothing fits."""
        table = self._table(peak)
        if self.level is None or self.level.table is not table:
            self.level = OuterLevel(self._costs, table)
        return self.level.fastest(peak, labels)

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

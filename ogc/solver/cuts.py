"""The cuts that plans may use, and at which of them nested ones divide: all in short regions, fewer in long ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..graph import Graph
from .costs import Ints, boundary_bytes

NEAR, FAR = 16, 24
"""Cuts of the finest grid, and of a coarser one, over which a region may reach."""

COARSER = 4
"""Ratio of the cuts of one grid to those of the next: below ``NEAR``, so that the finer one reaches over the gaps."""

ALL, MOST = 210, 128
"""Cuts up to which one grid is enough, and cuts of the coarsest of several; a region may reach over all of these."""

CONTEXT = 8
"""Operations on either side of cuts that are the same where they are alike."""

AT_ONCE = 8
"""Of the cuts that are too many, one in so many is dropped at once."""

GOLDEN = (np.sqrt(5) - 1) / 2
"""The fractions of its multiples are spread evenly, however many there are."""


@dataclass(frozen=True)
class CutGrid:
    """Regions between the ``chosen`` cuts (indices), as far as ``reach`` of them."""

    chosen: Ints
    reach: int


LONG = 1 / 3
"""Share of the program over which a value may be used that the user told to recompute, for no cut to fall there."""


def distinct(graph: Graph) -> Ints:
    """The cuts of a graph; of those between which nothing is made or saved, as around a view, the narrowest first.

    A value that the user told to recompute is recomputed once if no cut falls between its production and its last use.
    """
    cuts = np.array(graph.cuts)
    works = [bool(op.writes or op.saves or op.internal_bytes or op.scratch_bytes) for op in graph.operations]
    idle = np.diff(np.cumsum([0, *works])[cuts]) == 0  # from each cut to the next
    narrower = np.diff(boundary_bytes(graph)[cuts]) < 0
    dropped = np.append(idle & narrower, False) | np.insert(idle & ~narrower, 0, False)
    for v in graph.told.recomputed:
        first, last = graph.producers[v], graph.last_uses[v]
        dropped |= (first < cuts) & (cuts <= last) & (last - first <= LONG * len(graph))
    return np.asarray(cuts[~dropped | np.isin(cuts, (0, graph.end, len(graph)))])


def choose_grids(graph: Graph, cuts: Ints) -> list[CutGrid]:
    """Grids from all ``cuts`` to at most ``MOST`` of them, or one grid if they are few."""
    chosen = np.arange(len(cuts))
    grids: list[CutGrid] = []
    while len(chosen) > (MOST if grids else ALL):
        grids.append(CutGrid(chosen, FAR if grids else NEAR))
        chosen = thinned(graph, cuts, grids[-1], max(MOST, len(chosen) // COARSER))
    return [*grids, CutGrid(chosen, len(chosen) - 1)]


def thinned(graph: Graph, cuts: Ints, finer: CutGrid, count: int) -> Ints:
    """``count`` cuts of the finer grid, none further from the next than that grid reaches.

    The others are worth least: a cut's worth is the time between its nearest neighbours of no greater width, divided
    by the root of its width.
    """
    places = cuts[finer.chosen]
    seconds = np.cumsum([0.0, *(op.forward_seconds for op in graph.operations)])[places]
    widths = 1.0 + boundary_bytes(graph)[places]
    left = np.arange(len(places))
    while len(left) > count:
        last, after = _no_wider(widths[left]), len(left) - 1 - _no_wider(widths[left[::-1]])[::-1]
        worth = ((seconds[left[after]] - seconds[left[last]]) / np.sqrt(widths[left]))[1:-1]
        worth[left[2:] - left[:-2] > finer.reach] = np.inf
        dropped = np.zeros(len(left), bool)
        dropped[1 + np.argsort(worth, kind="stable")[: -(-(len(left) - count) // AT_ONCE)]] = True
        dropped[1:] &= ~dropped[:-1]  # what a cut is worth changes as those beside it are dropped
        left = left[~dropped]
    return np.asarray(finer.chosen[left])


def _no_wider(widths: NDArray[np.floating[Any]]) -> Ints:
    """For each cut, the last before it that is no wider, or else the first."""
    found, narrower = np.zeros(len(widths), np.int64), [0]
    for cut, width in enumerate(widths.tolist()):
        while len(narrower) > 1 and widths[narrower[-1]] > width:
            narrower.pop()
        found[cut] = narrower[-1]
        narrower.append(cut)
    return found


def narrowest(graph: Graph, cuts: Ints, count: int) -> list[int]:
    """At most ``count`` cuts: a tenth around the operations of the most bytes, else the narrowest of each region."""
    if len(cuts) <= count:
        return list(map(int, cuts))
    ends = np.searchsorted(cuts, (0, graph.end, len(graph)))
    stays = np.isin(np.arange(len(cuts)), [*ends, *_around_the_largest(graph, cuts, count // 10)])
    others, widths = np.flatnonzero(~stays), boundary_bytes(graph)[cuts]
    edges = np.linspace(0, len(others), count - int(stays.sum()) + 1).astype(int)
    stays[[others[a + np.argmin(widths[others[a:b]])] for a, b in pairwise(edges)]] = True
    return list(map(int, cuts[stays]))


def alike(graph: Graph, cuts: Ints) -> Ints:
    """The kind of each cut: the same number for those with the same ``CONTEXT`` operations before and behind them."""
    names: dict[Any, int] = {}
    codes = [
        names.setdefault((op.target, tuple(graph.values[v].bytes for v in op.writes)), len(names))
        for op in graph.operations
    ]
    padded = np.pad(codes, CONTEXT, constant_values=-1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * CONTEXT)[cuts]
    return np.unique(windows, axis=0, return_inverse=True)[1].reshape(-1)


def _around_the_largest(graph: Graph, cuts: Ints, count: int) -> list[int]:
    """About ``count`` cuts around the operations that need the most bytes by themselves, evenly spread among equals."""
    found: set[int] = set()
    bounds = np.array(graph.operation_bounds)
    spread = np.arange(len(bounds)) * GOLDEN % 1
    for t in np.lexsort((spread, -bounds)):
        place = int(np.searchsorted(cuts, t, side="right"))
        found.update(range(max(0, place - 2), min(len(cuts), place + 2)))
        if len(found) >= count:
            break
    return sorted(found)

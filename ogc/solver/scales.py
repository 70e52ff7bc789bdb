"""Which cuts a nested plan may use, near and far: all of them for short stretches, fewer and fewer for longer ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..graph import Graph
from .costs import Ints, boundary_bytes

NEAR = 8
"""Cuts over which a stretch may reach between any two cuts."""

FAR = 24
"""The same, counted in the cuts of a coarser scale."""

COARSER = 4
"""How many times fewer cuts a scale has than the one before."""

MOST = 80
"""Cuts of the coarsest scale, in which a stretch may reach as far as it likes."""


@dataclass(frozen=True)
class Scale:
    """Stretches between the ``chosen`` cuts (indices), as far as ``reach`` of them."""

    chosen: Ints
    reach: int


def choose_scales(graph: Graph, cuts: Ints) -> list[Scale]:
    """Scales from all ``cuts`` to at most ``MOST`` of them.

    A third of a coarser scale's cuts lies around the operations that need the most bytes by themselves.
    The others are what is left when those are dropped, one by one, that save little time for their width.
    """
    chosen = np.arange(len(cuts))
    scales: list[Scale] = []
    while len(chosen) > MOST:
        scales.append(Scale(chosen, FAR if scales else NEAR))
        chosen = _thin(graph, cuts, chosen, max(MOST, len(chosen) // COARSER))
    return [*scales, Scale(chosen, len(chosen) - 1)]


def _thin(graph: Graph, cuts: Ints, chosen: Ints, count: int) -> Ints:
    seconds = np.cumsum([0.0, *(op.forward_seconds for op in graph.operations)])[cuts]
    widths = np.sqrt(1.0 + boundary_bytes(graph)[cuts])
    stays = np.zeros(len(cuts), bool)
    stays[_around_the_largest(graph, cuts, count // 3)] = True
    while len(chosen) > count:
        before, here, after = chosen[:-2], chosen[1:-1], chosen[2:]
        worth = np.where(stays[here], np.inf, (seconds[after] - seconds[before]) / widths[here])
        chosen = np.delete(chosen, 1 + int(np.argmin(worth)))
    return chosen


def _around_the_largest(graph: Graph, cuts: Ints, count: int) -> list[int]:
    """About ``count`` cuts around the operations that need the most bytes by themselves."""
    found: set[int] = set()
    for t in np.argsort(-np.array(graph.operation_bounds), kind="stable"):
        place = int(np.searchsorted(cuts, t, side="right"))
        found.update(range(max(0, place - 2), min(len(cuts), place + 2)))
        if len(found) >= count:
            break
    return sorted(found)

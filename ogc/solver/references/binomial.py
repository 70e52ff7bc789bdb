"""Nested segments by the binomial rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb, isqrt

from ...graph import Graph
from ...plan import Segment, recomputed, saved
from ..nested import MOST_TIMES
from .common import counts, reference


@reference("binomial")
def binomial(graph: Graph) -> Iterable[Sequence[Segment]]:
    """Nested segments that are optimal for a chain of equal steps; the steps here lie between cuts.

    Source: Griewank & Walther, "Algorithm 799: revolve", 2000. With s snapshots, l <= C(s + r, s) steps are
    each run again r times at most, and as rarely as possible in all. Here s is chosen by the simulated peak,
    then the recomputed time, from where r is ``MOST_TIMES``, as for our own plans, to where it is 2. O(l r)
    for a plan, and its simulation.
    """
    steps = len(graph.cuts) - 1
    few_enough = (s for s in counts(isqrt(2 * steps) + 1) if _repetitions(steps, s) <= MOST_TIMES)
    return (revolve(graph.cuts, s) for s in few_enough)


def _repetitions(steps: int, snapshots: int) -> int:
    """The least r such that ``snapshots`` are enough to run no step again more than r times."""
    return next(r for r in range(steps) if comb(snapshots + r, snapshots) >= steps)


def revolve(cuts: Sequence[int], snapshots: int) -> tuple[Segment, ...]:
    """Segments between ``cuts`` by the binomial rule; the state at the first of them is one of the snapshots."""
    steps = len(cuts) - 1
    if steps == 1:
        return (saved(cuts[0], cuts[1]),)
    r = _repetitions(steps, snapshots)
    first = min(comb(snapshots + r - 1, snapshots), steps - comb(snapshots + r - 2, snapshots - 1))
    before = recomputed(cuts[0], cuts[first], *revolve(cuts[: first + 1], snapshots))
    return (before, *revolve(cuts[first:], snapshots - 1))

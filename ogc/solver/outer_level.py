"""The outermost level of a plan, exactly: the least peak, and the least recomputation within a peak.

Class of plans: cut the program order at allowed positions; each segment is saved, recomputed at once, perhaps but for
some values that it keeps, or, given a :class:`NestedTable`, recomputed through parts; every cut keeps its boundary.
For a threshold P, fewer bytes kept before a cut are never worse for what follows, so with

    K(j) = min over i < j and mode of  K(i) + kept(i, j)   where  K(i) + local(i, j) <= P

K(N) is finite exactly if some plan peaks at or below P; bisection over P gives the optimum, in O(C² log bytes)
for C cuts. A second pass, :mod:`ogc.solver.paths`, finds the fastest plan within a peak.

This extends the linear case of Feng & Huang, CVPR 2021, section 3 (checkpoints minimising the kept bytes
plus the largest interior) to a full memory model and to several levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..plan.decisions import Segment, recomputed, saved
from .costs import NEVER, RECOMPUTED, SAVED, Costs, Ints
from .nested import NestedTable
from .paths import LABELS, SLACK, ConstrainedPaths


class OuterLevel:
    """Plans over the segments of ``costs``, recomputed at once or as ``table`` says, if there is one."""

    def __init__(self, costs: Costs, table: NestedTable | None = None) -> None:
        self.cuts, self.grain, self.kept_values = costs.cuts, costs.grain, costs.kept_values
        self.table = table
        self.kept, self.local, self.seconds = costs.kept, costs.local, costs.seconds
        self.at_once = costs.local[RECOMPUTED]
        if table is not None:
            nested = np.maximum(table.least_bytes(), table.costs.forward[1])
            self.local = costs.local.copy()
            np.minimum(self.at_once, nested.T, out=self.local[RECOMPUTED])
        self.least_local = self.local.min(0)
        self.prices: NDArray[np.float64] | None = None  # of bytes, for the peak that was asked for last

    def least_peak(self, *, above: int = -1, near: int | None = None, tolerance: float = 0.0) -> int:
        """The least peak in bytes that any plan reaches.

        Args:
            above: bytes that no plan is known to stay within.
            near: a guess, from which to go down in small steps at first.
            tolerance: the peak may be larger than the least by this share of it.
        """
        high = step = int(self.local[SAVED, -1, 0])  # everything saved: always possible
        low = min(above, high - 1)
        if near is not None:
            high = self._peak_within(near) or high
            step = int(max(self.grain, tolerance * near))
        while high - low > max(self.grain, tolerance * high):
            middle = max((low + high) // 2, high - step)
            reached = self._peak_within(middle)
            low, high = (middle, high) if reached is None else (low, reached)
            step *= 4
        return high

    def _peak_within(self, peak: int) -> int | None:
        """The peak that a plan within ``peak`` bytes really has, or None if there is none."""
        least = self._least_kept(peak)
        if least[-1] >= NEVER:
            return None
        reached, j = 0, len(self.cuts) - 1
        while j > 0:
            needed = least[:j] + self.local[:, j, :j]
            total = np.where(needed <= peak, least[:j] + self.kept[:, j, :j], NEVER)
            mode, i = np.unravel_index(int(np.argmin(total)), total.shape)
            reached, j = max(reached, int(needed[mode, i])), int(i)
        return reached

    def _least_kept(self, peak: int) -> Ints:
        """K(j) for every cut j: the least bytes kept by a plan of the operations before j within ``peak``."""
        least = np.full(len(self.cuts), NEVER)
        least[0] = 0
        for j, near in self._starts(peak):
            before = least[near]
            fits = before + self.local[:, j, near] <= peak
            least[j] = (before + self.kept[:, j, near]).min(initial=NEVER, where=fits)
        return least

    def _starts(self, peak: int) -> Iterator[tuple[int, slice]]:
        """Each cut j but the first, and cuts i among which are all such that (i, j) fits by itself."""
        first = (self.least_local[1:] <= peak).argmax(1)
        return ((j, slice(i, j)) for j, i in enumerate(first.tolist(), 1))

    def fastest(self, peak: int, labels: int = LABELS, slack: Sequence[float] = SLACK) -> tuple[Segment, ...] | None:
        """The plan with the least recomputed time of those that peak at or below ``peak`` bytes, or None.

        ``labels`` and ``slack`` are those of :meth:`ConstrainedPaths.fastest`.
        """
        room = self._room(peak)
        if room[0] < 0:
            return None
        least = np.minimum(self._least_kept(peak), peak)
        count = len(self.cuts)
        pairs = np.flatnonzero(least + self.least_local <= peak)  # j and i in one number, several times faster
        j = pairs // count
        i = pairs - j * count  # numpy divides by a number many times faster than it finds remainders
        left, left_behind = peak - least[i], room[j] - least[i]
        fits = np.empty((len(pairs), len(self.local)), bool)
        for mode, (kept, local) in enumerate(zip(self.kept, self.local, strict=True)):
            fits[:, mode] = (local.reshape(-1)[pairs] <= left) & (kept.reshape(-1)[pairs] <= left_behind)
        pair, modes = np.nonzero(fits)
        i, j, pairs = i[pair], j[pair], pairs[pair]
        kept, local, seconds = (
            weights.reshape(-1)[modes * count**2 + pairs] for weights in (self.kept, self.local, self.seconds)
        )
        at_once = np.where(modes == RECOMPUTED, self.at_once.reshape(-1)[pairs], 0)
        limit, end = np.minimum(peak - local, room[j] - kept), int(np.searchsorted(j, count - 1))
        kept[end:] = local[end:]

        def time(numbers: Ints, before: Ints) -> NDArray[np.float64]:
            taken = seconds[numbers]
            if self.table is not None:
                parts = np.flatnonzero(at_once[numbers] > peak - before)
                taken[parts] = self.table.time(i[numbers[parts]], j[numbers[parts]], peak - before[parts])
            return taken

        paths = ConstrainedPaths(peak, i, j, limit, kept, time(np.arange(len(i)), least[i]), time)
        path, self.prices = paths.fastest(labels, slack, self.prices)
        return tuple(self._segment(modes[number], i[number], j[number], peak - before) for number, before in path)

    def _room(self, peak: int) -> Ints:
        """For each cut, the most kept bytes from which the rest of the program still fits; negative: none."""
        room = np.full(len(self.cuts), -1, np.int64)
        room[-1] = NEVER
        for j, near in reversed([*self._starts(peak)]):
            fits = np.minimum(peak - self.local[:, j, near], room[j] - self.kept[:, j, near])
            np.maximum(room[near], fits.max(0), out=room[near])
        return room

    def _segment(self, mode: int, i: int, j: int, room: int) -> Segment:
        start, stop = int(self.cuts[i]), int(self.cuts[j])
        if mode == SAVED:
            return saved(start, stop)
        if mode == RECOMPUTED and self.table is not None and room < self.at_once[j, i]:
            return self.table.segment(i, j, room)
        kept = (v for v, producer in self.kept_values[mode] if start <= producer < stop)
        return recomputed(start, stop, kept=kept)

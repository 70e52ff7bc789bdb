"""The two levels of the search: the outermost segments, exactly, and within a segment the parts of its recomputation.

Class of plans: cut the program order at allowed positions; each segment is saved, recomputed at once, perhaps but for
some values that it keeps, or, given a :class:`NestedTable`, recomputed through parts; every cut keeps its boundary.

**The outermost level.** For a threshold P, fewer bytes kept before a cut are never worse for what follows, so with

    K(j) = min over i < j and mode of  K(i) + kept(i, j)   where  K(i) + local(i, j) <= P

K(N) is finite exactly if some plan peaks at or below P; bisection over P gives the optimum, in O(C² log bytes)
for C cuts. A second pass, :mod:`ogc.solver.paths`, finds the fastest plan within a peak. Bytes are exact.
This extends the linear case of Feng & Huang, CVPR 2021, section 3 (checkpoints minimising the kept bytes
plus the largest interior) to a full memory model and to several levels.

**Nested plans.** A region may be recomputed in parts, each saved or recomputed in its turn: all trees of
:class:`ogc.Segment` over the cuts of each grid. Objective: the least recomputed time within a number of bytes, for all
numbers at once. With m bytes available above what was kept before cut i,

    T(i, j, m) = min( recompute (i, j) at once,
                      T(i, j, m) between the cuts of a finer grid,
                      min over k of  run (i, k) keeping what crosses k, then T(k, j, m - kept), then T(i, k, m),
                      min over k <= i + WHOLE of  run (i, k) keeping what it saves, then T(k, j, m - kept) )

is the time that the backward of (i, j) adds, unless that exceeds ``MOST_TIMES`` runs of (i, j). Bytes are counted in
units, always rounded against the plan.

Complexity for M units and grids of C cuts that reach over R of them: O(C R² M) array steps and O(C R M)
memory each. With one grid that reaches over all cuts, this is the persistent dynamic programme for
heterogeneous chains (Beaumont et al., "Optimal memory-aware backpropagation of deep join networks", 2020,
and Herrmann et al., 2019) over the cuts of a graph: exact on a chain up to the rounding; on other graphs every cut
pays for its whole boundary, which the simulator may find to be less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import proxy

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..plan.decisions import Segment, recomputed, saved
from .costs import NEVER, RECOMPUTED, SAVED, Costs, Ints, NestedCosts
from .cuts import CutGrid
from .paths import LABELS, SLACK, ConstrainedPaths

Floats = NDArray[np.float32]

WHOLE = 8
"""Cuts over which a part may reach that is saved while the region is recomputed, unless it is the last."""

MOST_TIMES = 32
"""Times that a region may be recomputed, on average over its operations. Only long chains come near that."""

LONGEST = np.finfo(np.float32).max
"""The most seconds that are still possible."""

FREQUENT = 32
KEPT = 8
"""Sizes of kept values that a unit is chosen for, and values kept at once, over which rounding adds up."""

PORTION = 2**19
"""Numbers that are worked on at once: few enough for the processor's cache, enough for calls to cost little."""


class NestedTable:
    """The table T for one set of cuts and one range of bytes.

    Args:
        costs: of the regions between the cuts.
        grids: of cuts between which T is known, from the finest to the coarsest.
        most_bytes: the largest number of bytes of interest.
        levels: the units into which that is divided.
    """

    def __init__(self, costs: NestedCosts, grids: Sequence[CutGrid], most_bytes: int, levels: int) -> None:
        self.costs = costs
        self.levels = levels
        self.unit = _best_unit(costs, max(1, -(-most_bytes // (levels - 1))))
        sizes = [len(grid.chosen) * (grid.reach + 1) for grid in grids]
        self.firsts = np.cumsum([1, *sizes])
        # A row per pair of cuts of each grid, looked up with fewer bytes by a window further to the left.
        # Row 0 is impossible altogether; rows of no pair are not looked up.
        self.rows: Floats = np.zeros((self.firsts[-1], levels), np.float32)
        self.rows[0] = np.inf
        self.least = np.full(len(self.rows), levels)  # units with which the pair of a row is possible
        self.windows = _windows(self.rows, levels)
        barriers = np.repeat(np.array([np.inf, 0], np.float32), levels)
        self.barriers = _windows(barriers, levels)  # row n is infinite below levels - n units
        self.row_of = np.zeros((len(costs.cuts),) * 2, np.int64)  # the row of the coarsest grid that has the pair
        self.finer = np.zeros(self.firsts[-1], np.int64)  # by row: the row of the same pair, one grid finer
        self.grids = [_GridTable(self, *each) for each in zip(grids, self.firsts[:-1], strict=True)]

    def least_bytes(self) -> Ints:
        """[i, j]: the fewest bytes with which the backward of (i, j) can be carried out."""
        return np.where(self.least < self.levels, self.least * self.unit, NEVER)[self.row_of]

    def time(self, i: Ints, j: Ints, room: Ints) -> Floats:
        """T(i, j, room) for arrays of cuts and bytes."""
        return self.rows[self.row_of[i, j], np.minimum(np.maximum(room, 0) // self.unit, self.levels - 1)]

    def segment(self, i: int, j: int, room: int) -> Segment:
        """The recomputed segment (i, j) that takes T(i, j, room)."""
        parts = self.parts(int(self.row_of[i, j]), min(self.levels - 1, room // self.unit))
        return recomputed(int(self.costs.cuts[i]), int(self.costs.cuts[j]), *parts)

    def parts(self, row: int, m: int) -> list[Segment]:
        """The parts in which the pair of a row is recomputed with m units available."""
        return self.grids[int(np.searchsorted(self.firsts, row, side="right")) - 1].parts(row, m)

    def in_units(self, weights: Ints) -> Ints:
        """Bytes in units, rounded up."""
        limit = 2 * self.levels * self.unit
        return -(-np.clip(weights, -limit, limit) // self.unit)


class _GridTable:
    """T between the cuts of one grid; costs are in units, by [i, length] for the pair (i, i + length)."""

    def __init__(self, table: NestedTable, grid: CutGrid, first: int) -> None:
        self.table: NestedTable = proxy(table)  # no cycle, so that large tables go with the last use of theirs
        self.width = grid.reach + 1
        self.first = first
        self.count = len(grid.chosen)
        self.cuts = table.costs.cuts[grid.chosen]
        self.shifts = np.arange(table.levels)
        here = slice(first, first + self.width * self.count)
        self.least = table.least[here].reshape(self.width, self.count).T  # [i, length]
        costs = table.costs
        ends = np.minimum(np.arange(self.count)[:, None] + np.arange(self.width), self.count - 1)
        starts, stops = grid.chosen[:, None], grid.chosen[ends]
        self.kept, self.forward = (
            [table.in_units(weights[starts, stops]) for weights in modes] for modes in (costs.kept, costs.forward)
        )
        self.backward, self.at_once, self.running, self.waiting = (
            table.in_units(weights[starts, stops])
            for weights in (costs.backward, costs.at_once, costs.running, costs.waiting)
        )
        self.seconds = [seconds[starts, stops].astype(np.float32) for seconds in costs.seconds]
        self.at_once_seconds = costs.at_once_seconds[starts, stops].astype(np.float32)
        for length in range(1, self.width):
            i = np.arange(self.count - length)
            chosen = grid.chosen[i], grid.chosen[i + length]
            rows = self._row(i, length)
            table.finer[rows] = table.row_of[chosen]
            table.row_of[chosen] = rows
            for portion in np.array_split(i, 1 + length * len(i) * table.levels // PORTION):
                self._fill(portion, length)

    def _row(self, i: Any, length: Any) -> Any:
        return self.first + length * self.count + i

    def _fill(self, i: Ints, length: int) -> None:
        """Find T for the pairs (i, i + length), of which the starts follow one another."""
        rows = self._row(i, length)
        times, finer = self._at_once(i, length), self.table.finer[rows]
        if finer.any():
            np.minimum(times, self.table.rows[finer], out=times)
        # With bytes enough to recompute the longest at once, nothing is faster.
        stop = min(self.table.levels, int(self.at_once[i, length].max()))
        for choices in self._divided(i, length, stop):
            here = times[:, stop - choices.shape[2] : stop]
            np.minimum(here, choices.min(0), out=here)
        impossible = times > np.minimum(MOST_TIMES * self.seconds[0][i, length, None], LONGEST)
        np.copyto(times, np.inf, where=impossible)
        self.table.rows[rows] = times
        self.least[i, length] = impossible.sum(1)

    def _at_once(self, i: Ints, length: int) -> Floats:
        """[pair, m]: time of the backward of each pair (i, i + length) if it is recomputed at once."""
        fits = self.shifts >= self.at_once[i, length, None]
        return np.where(fits, self.at_once_seconds[i, length, None], np.float32(np.inf))

    def _divided(self, i: Ints, length: int, stop: int, start: int = 0) -> Iterator[Floats]:
        """[choice, pair, m]: time of the backward of each pair if it is divided at k = i + 1, i + 2 ....

        First for all k with (i, k) recomputed later, then for k near i with (i, k) saved. Of the units m from
        ``start`` to before ``stop``, those from which some choice is possible, and at least the last one.
        """
        if length == 1:
            return
        levels, pairs = self.table.levels, slice(int(i[0]), int(i[-1]) + 1)
        for mode, most in ((1, length - 1), (0, min(WHOLE, length - 1))):
            lengths = np.arange(1, most + 1)[:, None]
            before, after = (pairs, slice(1, most + 1)), (i + lengths, length - lengths)
            kept = self.kept[mode][before].T
            need = self.forward[mode][before].T + self.running[i, length]
            np.maximum(need, (self.least if mode else self.backward)[before].T, out=need)
            np.maximum(need, kept + self.least[after], out=need)
            np.maximum(need, self.waiting[i, length], out=need)
            m = slice(max(start, min(stop - 1, int(need.min()))), stop)
            found: Floats = self.table.windows[:, m][self._row(*after) * levels - np.minimum(kept, levels)]
            found += self.table.barriers[:, m][levels - np.minimum(need, levels)]
            if mode:
                found += self._before(pairs.start, found.shape, m.start)
            found += self.seconds[mode][before].T[..., None]
            yield found

    def _before(self, i: int, shape: tuple[int, ...], m: int) -> Floats:
        """[choice, pair, m]: T(i, k) from ``m`` on, for pairs from ``i`` on and k = i + 1, i + 2 ...."""
        rows = self.table.rows[self.first + self.count + i :, m:]
        size = rows.strides[0]
        return as_strided(rows, shape, (size * self.count, size, rows.itemsize))

    def parts(self, row: int, m: int) -> list[Segment]:
        """The parts in which the pair of a row is recomputed with m units available."""
        parts: list[Segment] = []
        while True:
            length, i = divmod(row - self.first, self.count)
            if m >= self.at_once[i, length]:  # nothing is faster, but for what is rounded
                return [*parts, saved(*self._span(i, length))]
            finer = int(self.table.finer[row])
            if self.table.rows[finer, m] <= self.table.rows[row, m]:
                return [*parts, *self.table.parts(finer, m)]
            choices = [found[:, 0, 0] for found in self._divided(np.array([i]), length, m + 1, m)]
            choice = int(np.argmin(np.concatenate(choices)))
            mode, first = (1, choice + 1) if choice < length - 1 else (0, choice - length + 2)
            if mode:
                parts.append(recomputed(*self._span(i, first), *self.parts(self._row(i, first), m)))
            else:
                parts.append(saved(*self._span(i, first)))
            m = min(self.table.levels - 1, m - int(self.kept[mode][i, first]))
            row = self._row(i + first, length - first)

    def _span(self, i: int, length: int) -> tuple[int, int]:
        return int(self.cuts[i]), int(self.cuts[i + length])


def _best_unit(costs: NestedCosts, least: int) -> int:
    """A unit of at least so many bytes, up to about twice as many, in which most of what is kept is a whole number."""
    kept = np.concatenate([np.diagonal(costs.kept[1], length) for length in (1, 2, 4)])
    sizes, counts = np.unique(kept[kept > 0], return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[:FREQUENT]
    sizes, counts = sizes[frequent], counts[frequent]
    parts = [size // number for size in sizes for number in range(size // (2 * least) + 1, size // least + 1)]
    units = costs.grain * -(-np.array([least, *parts], np.int64) // costs.grain)
    rounded = (-sizes[:, None] % units).T @ counts / max(1, counts.sum())
    return int(units[np.argmin(units + KEPT * rounded)])


def _windows(numbers: Floats, width: int) -> Floats:
    """[n]: the ``width`` numbers from the n-th on."""
    return as_strided(numbers, (numbers.size - width + 1, width), (numbers.itemsize,) * 2)


class OuterLevel:
    """Plans over the segments of ``costs``, recomputed at once or as ``table`` says, if there is one."""

    def __init__(self, costs: Costs, table: NestedTable | None = None) -> None:
        self.cuts, self.grain, self.kept_values = costs.cuts, costs.grain, costs.kept_values
        self.table = table
        self.kept, self.local, self.seconds = costs.kept, costs.local, costs.seconds
        self.at_once = costs.local[RECOMPUTED]
        if table is not None:
            nested = np.maximum(table.least_bytes(), table.costs.first)
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
        high = step = int(self.local[SAVED, -1, 0])  # everything saved: always possible, unless the user told otherwise
        if high >= NEVER:
            high = step = int(self.local[:, -1, 0].min())
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
        return recomputed(start, stop, saved_values=kept)

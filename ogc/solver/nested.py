"""Nested plans: a stretch that is run again may be run in parts, each kept or run again in its turn.

Class of plans: all trees of :class:`ogc.Segment` over chosen cuts. Objective: the least recomputed time
within a number of bytes, for all numbers at once. With m bytes at hand above what was kept before cut i,

    T(i, j, m) = min( run (i, j) again at once,
                      min over k of  run (i, k) keeping what crosses k, then T(k, j, m - kept), then T(i, k, m),
                      min over k <= i + WHOLE of  run (i, k) keeping what it saves, then T(k, j, m - kept) )

is the time that the backward of (i, j) adds. Bytes are counted in units, always rounded against the plan.
The table holds for every outermost level; that level itself is planned with exact bytes by
:mod:`ogc.solver.interval`, for which (i, j) is one more kind of segment with T(i, j, m) as its time.

Complexity for C cuts and M units: O(C³ M) array steps, O(C² M) memory. This is the persistent dynamic
programme for heterogeneous chains (Beaumont et al., "Optimal memory-aware backpropagation of deep join
networks", 2020, and Herrmann et al., 2019) carried over to the cuts of a graph. On a chain, and up to the
rounding, it is exact; on other graphs every cut pays for its whole boundary, which the simulator may find
to be less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..plan import Segment, recomputed, saved
from .costs import NEVER, Ints, NestedCosts

Floats = NDArray[np.float32]

WHOLE = 16
"""Cuts over which a part may reach that is kept whole while it is run again, unless it is the last."""


@dataclass(frozen=True)
class _Units:
    """Weights in units of bytes; axis ``mode`` is first where there is one."""

    kept: Ints
    forward: Ints
    backward: Ints
    again: Ints
    running: Ints


class NestedTable:
    """The table T for one set of cuts and one range of bytes.

    Args:
        costs: of the stretches between the cuts.
        most_bytes: the largest number of bytes of interest.
        levels: into how many units it is divided.
    """

    def __init__(self, costs: NestedCosts, most_bytes: int, levels: int) -> None:
        self.costs = costs
        self.count = len(costs.cuts)
        self.levels = levels
        self.unit = max(1, -(-most_bytes // (levels - 1)))
        self.units = self._in_units()
        self.shifts = np.arange(levels)
        # Right-hand parts are looked up by (j, k), left-hand parts by (i, k). What is looked up with fewer
        # bytes than there are is a window further to the left, into the impossible first half of the row.
        self.by_stop: Floats = np.full((self.count, self.count, 2 * levels), np.inf, np.float32)
        self.by_start: Floats = np.full((self.count, self.count, levels), np.inf, np.float32)
        # Windows of one row's length on the flat table, by where they begin.
        flat = self.by_stop.reshape(-1)
        self.windows = as_strided(flat, (flat.size - levels + 1, levels), (flat.itemsize, flat.itemsize))
        self.seconds = costs.seconds.astype(np.float32)
        self.again_seconds = costs.again_seconds.astype(np.float32)
        self._fill()

    def least_bytes(self) -> Ints:
        """[i, j]: the fewest bytes with which the backward of (i, j) can be carried out."""
        possible = np.isfinite(self.by_start)
        return np.where(possible.any(2), possible.argmax(2) * self.unit, NEVER)

    def time(self, i: Ints, j: int, room: Ints) -> Floats:
        """T(i, j, room) for arrays of i and bytes."""
        return self.by_start[i, j, np.clip(room // self.unit, 0, self.levels - 1)]

    def segment(self, i: int, j: int, room: int) -> Segment:
        """The recomputed segment (i, j) that takes T(i, j, room)."""
        return recomputed(*self._span(i, j), *self._parts(i, j, min(self.levels - 1, room // self.unit)))

    def _in_units(self) -> _Units:
        limit = 2 * self.levels * self.unit

        def up(weights: Ints) -> Ints:
            return -(-np.clip(weights, -limit, limit) // self.unit)

        costs = self.costs
        return _Units(up(costs.kept), up(costs.forward), up(costs.backward), up(costs.again), up(costs.running))

    def _fill(self) -> None:
        for length in range(1, self.count):
            i = np.arange(self.count - length)
            rows = self._at_once(i, i + length)
            for choices in self._divided(i, i + length):
                np.minimum(rows, choices.min(1), out=rows)
            self.by_start[i, i + length] = self.by_stop[i + length, i, self.levels :] = rows

    def _at_once(self, i: Ints, j: Ints) -> Floats:
        """[pair, m]: time of the backward of each pair (i, j) if it is run again at once."""
        fits = self.shifts >= self.units.again[i, j, None]
        return np.where(fits, self.again_seconds[i, j, None], np.float32(np.inf))

    def _divided(self, i: Ints, j: Ints) -> Iterator[Floats]:
        """[pair, choice, m]: the same if it is divided at k = i + 1, i + 2 ..., for pairs of one length.

        First for all k with (i, k) forgotten, then for k near i with (i, k) kept whole.
        """
        length = int(j[0] - i[0])
        units, beside = self.units, self.units.running[i, j, None]
        i, j = i[:, None], j[:, None]
        if length > 1:
            k = i + np.arange(1, length)
            forgotten = self._after(j, k, units.kept[1, i, k], units.forward[1, i, k] + beside)
            forgotten += self.by_start[i, k]
            forgotten += self.seconds[1, i, k, None]
            yield forgotten
            k = k[:, :WHOLE]
            need = np.maximum(units.forward[0, i, k] + beside, units.backward[i, k])
            whole = self._after(j, k, units.kept[0, i, k], need)
            whole += self.seconds[0, i, k, None]
            yield whole

    def _after(self, j: Ints, k: Ints, kept: Ints, need: Ints) -> Floats:
        """[pair, choice, m]: T(k, j) with ``kept`` units less at hand, impossible below ``need``."""
        rows = (j * self.count + k) * (2 * self.levels)
        found: Floats = self.windows[rows + self.levels - np.minimum(kept, self.levels)]
        np.copyto(found, np.float32(np.inf), where=self.shifts < need[..., None])
        return found

    def _parts(self, i: int, j: int, m: int) -> list[Segment]:
        """The parts in which (i, j) is run again with m units at hand."""
        parts: list[Segment] = []
        while True:
            pair = np.array([i]), np.array([j])
            times = [self._at_once(*pair)[:, m], *(choices[0, :, m] for choices in self._divided(*pair))]
            choice = int(np.argmin(np.concatenate(times)))
            if choice == 0:
                return [*parts, saved(*self._span(i, j))]
            mode, k = (1, i + choice) if choice < j - i else (0, i + choice - (j - i - 1))
            if mode:
                parts.append(recomputed(*self._span(i, k), *self._parts(i, k, m)))
            else:
                parts.append(saved(*self._span(i, k)))
            m = min(self.levels - 1, m - int(self.units.kept[mode, i, k]))
            i = k

    def _span(self, i: int, j: int) -> tuple[int, int]:
        return int(self.costs.cuts[i]), int(self.costs.cuts[j])

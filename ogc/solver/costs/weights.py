"""Tables of weights for all stretches between two cuts: the data that the search works on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SAVED, AGAIN = range(2)
"""The modes that keep no values of their own."""

Keeping = tuple[tuple[int, int], ...]
"""Values that a mode keeps, each with the position of what makes it."""

NEVER = np.iinfo(np.int64).max // 4
"""Bytes that no plan may have: marks the impossible; a sum of two does not overflow."""


@dataclass(frozen=True)
class Costs:
    """Weights of all segments (i, j) between cuts, by [mode, j, i]: all that end at one cut lie side by side.

    Mode ``SAVED`` is saved, ``AGAIN`` recomputed at once, further modes recomputed at once but for the values that
    ``keeping`` has for them. ``kept`` is what a segment adds to the bytes that outlive the forward, ``local``
    the most bytes alive in its forward, its recomputation and its backward, above what was kept before it.
    ``seconds`` is the time of running it again at once. All bytes are multiples of ``grain``.
    """

    cuts: Ints
    grain: int
    kept: Ints
    local: Ints
    seconds: NDArray[np.float64]
    keeping: tuple[Keeping, ...]

    def between(self, chosen: Ints) -> Costs:
        """The weights of the segments between the chosen cuts (indices)."""
        pairs = np.ix_(chosen, chosen)
        kept, local = (weights[:, pairs[0], pairs[1]] for weights in (self.kept, self.local))
        seconds = self.seconds[:, pairs[0], pairs[1]]
        return replace(self, cuts=self.cuts[chosen], kept=kept, local=local, seconds=seconds)

    def undominated(self) -> Costs:
        """The weights without segments that keep values to no avail: some mode is faster with no more bytes, or one
        before theirs is as fast."""
        kept, local, seconds = self.kept, self.local.copy(), self.seconds
        for n in range(AGAIN + 1, len(local)):
            for m in range(len(local)):
                if m != n:
                    faster = seconds[m] <= seconds[n] if m < n else seconds[m] < seconds[n]
                    local[n][faster & (kept[m] <= kept[n]) & (local[m] <= local[n])] = NEVER
        used = 1 + max(n for n in range(len(local)) if n <= AGAIN or local[n].min() < NEVER)
        return replace(self, kept=kept[:used], local=local[:used], seconds=seconds[:used], keeping=self.keeping[:used])


@dataclass(frozen=True)
class NestedCosts:
    """Weights of all stretches (i, j) between cuts, for plans that may run a stretch again in parts.

    By [i, j], some for two modes: mode 0 keeps what the stretch saves, mode 1 only what crosses its end.

    Attributes:
        cuts: positions.
        grain: a divisor of all bytes.
        kept: bytes that the stretch leaves behind.
        forward: most bytes alive while it runs.
        backward: most bytes alive in its backward, given what it saved.
        again: most bytes alive while it is run again at once and in its backward.
        running: bytes alive besides, while something in it is run again: gradients, outputs, and values that
            are used beyond its end.
        waiting: most bytes alive in its backward before something in it is run again.
        seconds: time of running it.
        again_seconds: time of running it again at once.
    """

    cuts: Ints
    grain: int
    kept: tuple[Ints, Ints]
    forward: tuple[Ints, Ints]
    backward: Ints
    again: Ints
    running: Ints
    waiting: Ints
    seconds: tuple[NDArray[np.float64], NDArray[np.float64]]
    again_seconds: NDArray[np.float64]

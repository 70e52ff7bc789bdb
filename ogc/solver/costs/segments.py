"""Weights of every segment between two cuts: saved, run again at once, or run again but for values that it keeps.

The rule that makes them depend on the two ends alone: every cut keeps its whole boundary, and a kept value is released
by position: after the segment with its first use has run again, or after the backward of its first saver. Complexity
for N operations, V values and C cuts: O(C (N + V)) memory, O(C² N) simple array steps at most.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from .arrays import NEVER, Bools, Ints, prefix
from .recompute import RecomputeCosts

SAVED, RECOMPUTED = range(2)
"""The modes that keep no values of their own."""

KeptValues = tuple[tuple[int, int], ...]
"""Values that a mode keeps, each with the position of what makes it."""


@dataclass(frozen=True)
class Costs:
    """Weights of all segments (i, j) between cuts, by [mode, j, i]: all that end at one cut lie side by side.

    Mode ``SAVED`` is saved, ``RECOMPUTED`` recomputed at once, further modes recomputed at once but for the values that
    ``kept_values`` has for them. ``kept`` is what a segment adds to the bytes that outlive the forward, ``local``
    the most bytes alive in its forward, its recomputation and its backward, above what was kept before it.
    ``seconds`` is the time of running it again at once. All bytes are multiples of ``grain``.
    """

    cuts: Ints
    grain: int
    kept: Ints
    local: Ints
    seconds: NDArray[np.float64]
    kept_values: tuple[KeptValues, ...]

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
        for n in range(RECOMPUTED + 1, len(local)):
            for m in range(len(local)):
                if m != n:
                    faster = seconds[m] <= seconds[n] if m < n else seconds[m] < seconds[n]
                    local[n][faster & (kept[m] <= kept[n]) & (local[m] <= local[n])] = NEVER
        used = 1 + max(n for n in range(len(local)) if n <= RECOMPUTED or local[n].min() < NEVER)
        return replace(
            self, kept=kept[:used], local=local[:used], seconds=seconds[:used], kept_values=self.kept_values[:used]
        )


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
        at_once: most bytes alive while it is run again at once and in its backward.
        running: bytes alive besides, while something in it is run again: gradients, outputs, and values that
            are used beyond its end.
        waiting: most bytes alive in its backward before something in it is run again.
        seconds: time of running it.
        at_once_seconds: time of running it again at once.
    """

    cuts: Ints
    grain: int
    kept: tuple[Ints, Ints]
    forward: tuple[Ints, Ints]
    backward: Ints
    at_once: Ints
    running: Ints
    waiting: Ints
    seconds: tuple[NDArray[np.float64], NDArray[np.float64]]
    at_once_seconds: NDArray[np.float64]


@dataclass(frozen=True)
class _Mode:
    """Weights of all segments in one mode, by [i, j]: those of :class:`Costs`, with the forward's most bytes apart."""

    kept: Ints
    forward: Ints
    local: Ints
    seconds: NDArray[np.float64]


class SegmentCosts(RecomputeCosts):
    """Weights of every segment (i, j) between two of the cuts.

    What is relative to K(i) may be negative: kept values that a later segment alone uses are free by then.
    """

    def costs(self, *kept_values: Collection[int]) -> Costs:
        """The weights for the outermost level, with a further mode for each set of values that may be kept.

        Each set has all values of the one before it.
        """
        producers = [tuple((v, int(self.producer[v])) for v in sorted(values)) for values in kept_values]
        shape = (2 + len(kept_values), *self.later.shape)
        kept, local, seconds = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape)
        # One after the other: each takes memory.
        for n, mode in enumerate(chain((self._whole, self._at_once), map(self._recomputed, kept_values))):
            kept[n], local[n], seconds[n] = mode.kept.T, np.maximum(mode.forward, mode.local).T, mode.seconds.T
        local[2:][seconds[2:] >= seconds[1:-1]] = NEVER  # nothing is gained
        return Costs(self.cuts, self.grain, kept, local, seconds, ((), (), *producers))

    @cached_property
    def nested(self) -> NestedCosts:
        """The weights for plans that may run a stretch again in parts."""
        at_once = self._at_once
        # Values that cross j and are used before it are still there when (i, j) is run again.
        retained = self._sum_ij(
            (0, self.made, np.maximum(self.made, self.first_used), self.last_used, np.where(self.output, 0, self.size))
        )
        retained += self._internals(self.internal * self.small) + self._later_outputs()[:, None]
        once, before = self._asked
        sooner = self._sooner()
        # A stretch with an operation that must not run twice takes forever to run again.
        per_operation = np.where(self.replayable, self.seconds, np.inf)[:, None]
        saved_seconds, crossing_seconds = (
            self._from_cut(np.where(runs, per_operation, 0.0)) for runs in (self._within(), self._crossing())
        )
        return NestedCosts(
            cuts=self.cuts,
            grain=self.grain,
            kept=(self._whole.kept, at_once.kept),
            forward=(self._whole.forward, at_once.forward),
            backward=self._backward,
            at_once=np.maximum(at_once.local, self._backward) + sooner,
            running=retained + once + sooner,
            waiting=retained + before,
            seconds=(saved_seconds, crossing_seconds),
            at_once_seconds=at_once.seconds,
        )

    @cached_property
    def grain(self) -> int:
        """The greatest common divisor of all bytes."""
        weights = [self.size, self.internal, self.scratch, self.gradient, self.backward_peak, self.late_peak]
        return max(1, int(np.gcd.reduce(np.concatenate(weights))))

    @cached_property
    def _whole(self) -> _Mode:
        """Weights of saved segments."""
        return _Mode(
            kept=self._kept(self.saved, self.internal),
            forward=self._forward(self.saved, self.internal),
            local=self._backward,
            seconds=np.broadcast_to(0.0, self.later.shape),
        )

    @cached_property
    def _at_once(self) -> _Mode:
        """Weights of segments that are run again at once."""
        return self._recomputed(())

    def _recomputed(self, values: Collection[int]) -> _Mode:
        """Weights of segments that are run again at once, but for these values, which stay."""
        stay = np.zeros(len(self.size), bool)
        stay[list(values)] = True
        kept = np.array(self.graph.keeps_internals_with(values), bool)
        unkept = ~stay[:, None] & (np.arange(len(self.cuts)) >= self.last_used[:, None])  # [v, j]: no copy at cut j
        alive = self._alive(unkept, kept)
        internal = self.internal * kept
        asking = self._first_asking(unkept, kept) if values else self._first_to_ask
        recompute = np.where(self.later, self._recompute(alive, unkept, stay, kept, asking), NEVER)
        return _Mode(
            kept=self._kept(stay, internal),
            forward=self._forward(stay, internal),
            local=np.maximum(self._backward_from(asking), recompute),
            seconds=self._from_cut(alive * self.seconds[:, None]) + self.run_seconds,
        )

    def _kept(self, stay: Bools, internal: Ints) -> Ints:
        """Bytes that a segment adds to those outliving the forward, if these values and internals do."""
        until = np.where(stay, len(self.cuts), self.last_used)
        kept = self._sum_ij((0, self.made, self.made, until, self.size)) + self._internals(internal)
        return np.where(self.later, kept, NEVER)

    def _forward(self, stay: Bools, internal: Ints) -> Ints:
        """Most bytes alive in the first run of a segment, above K(i), if these values and internals outlive it."""
        until = np.where(stay, self.n, np.minimum(self.last_use + 1 - self.taken_over, self.n))
        live = self._sum_it((0, self.made, self.producer, until, self.size))
        earlier = prefix(internal)
        live += earlier[:-1] + self.internal + self.scratch
        live -= earlier[self.cuts][:, None]
        return self._at_ends(self._most_until(live))

    @cached_property
    def _backward(self) -> Ints:
        """Most bytes alive in the backward of a segment, above K(i)."""
        return self._at_ends(self._backward_peaks)

    def _backward_from(self, asking: Ints) -> Ints:
        """[i, j]: most bytes alive above K(i) in the backward, once an operation has asked for a run again."""
        most = np.take_along_axis(self._backward_peaks, np.maximum(asking, 0), 1)
        return np.where(self.later & (asking >= 0), most, self._backward)

    @cached_property
    def _backward_peaks(self) -> Ints:
        """[i, t]: most bytes alive above K(i) in the backward from operation t to cut i, with all that is saved."""
        done = prefix(self.internal)
        internals = done[1:][None, :] - done[self.cuts][:, None] + self._later_outputs()[:, None]

        def live(released: Ints, gradients: Ints) -> Ints:
            values = self._sum_it(
                (0, self.made, released, self.n, np.where(~self.output & self.saved, self.size, 0)),
                (self.made, self.first_used, 0, released, np.where(self.passes, -self.size, 0)),
            )
            values += internals
            values += gradients
            return values

        # Once an operation has let go of what it saved, values that it alone saved are gone.
        late = np.where(self.late_peak > 0, self.late_peak, -NEVER)
        return self._most_until(np.maximum(live(self.saver, self.backward_peak), live(self.saver + 1, late)))

"""Costs of every segment between two cuts: saved, recomputed at once, or recomputed but for values that it keeps.

The rule that makes them depend on the two ends alone: every cut keeps its whole boundary, and a kept value is released
by position: after the recomputation of the segment with its first use, or after the backward of its first saver.

A value contributes where its producer lies on one side of a cut and its last use, first use or first saver on the
other: a rectangle of pairs of cuts, and no sum loops over pairs. Complexity for N operations, V values and C cuts:
O(C (N + V)) memory, O(C² N) array steps at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..graph import Graph

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEVER = np.iinfo(np.int64).max // 4
"""Bytes that no plan may have: marks the impossible; a sum of two does not overflow."""

Rectangles = tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike, Ints]
"""Rows from and to, columns from and to, and a weight, for every value."""


SAVED, RECOMPUTED = range(2)
"""The modes that keep no values of their own."""

KeptValues = tuple[tuple[int, int], ...]
"""Values that a mode keeps, each with the position of what makes it."""


@dataclass(frozen=True)
class Costs:
    """Costs of all segments (i, j) between cuts, by [mode, j, i]: all that end at one cut lie side by side.

    Attributes:
        cuts: positions.
        grain: a divisor of all bytes.
        kept: bytes that a segment adds to those that outlive the forward.
        local: most bytes alive in its forward, recomputation and backward, above what was kept before it.
        seconds: time of recomputing it at once.
        kept_values: that modes beyond ``RECOMPUTED`` keep.
    """

    cuts: Ints
    grain: int
    kept: Ints
    local: Ints
    seconds: NDArray[np.float64]
    kept_values: tuple[KeptValues, ...]

    def between(self, chosen: Ints) -> Costs:
        """The costs of the segments between the chosen cuts (indices)."""
        pairs = np.ix_(chosen, chosen)
        kept, local = (weights[:, pairs[0], pairs[1]] for weights in (self.kept, self.local))
        seconds = self.seconds[:, pairs[0], pairs[1]]
        return replace(self, cuts=self.cuts[chosen], kept=kept, local=local, seconds=seconds)

    def staying(self, share: float) -> Costs:
        """The costs where a share of what is kept stays in the device's memory, and the rest is offloaded."""
        return replace(self, kept=np.where(self.kept < NEVER, (share * self.kept).astype(np.int64), NEVER))

    def undominated(self) -> Costs:
        """The costs without modes in vain: another is faster with no more bytes, or as fast and before it."""
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
    """Costs of all regions (i, j) between cuts, for plans that may recompute a region in parts.

    By [i, j], some for two modes: mode 0 keeps what the region saves, mode 1 only what crosses its end.

    Attributes:
        cuts: positions.
        grain: a divisor of all bytes.
        kept: bytes that the region leaves behind.
        first: most bytes alive while it runs in the forward, in mode 1.
        forward: most bytes alive while it runs again.
        backward: most bytes alive in its backward, given what it saved.
        at_once: most bytes alive while it is recomputed at once and in its backward.
        running: bytes alive besides, while something in it is recomputed: gradients, outputs, values used beyond it.
        waiting: most bytes alive in its backward before something in it is recomputed.
        seconds: time of running it.
        at_once_seconds: time of recomputing it at once.
    """

    cuts: Ints
    grain: int
    kept: tuple[Ints, Ints]
    first: Ints
    forward: tuple[Ints, Ints]
    backward: Ints
    at_once: Ints
    running: Ints
    waiting: Ints
    seconds: tuple[NDArray[np.float64], NDArray[np.float64]]
    at_once_seconds: NDArray[np.float64]


@dataclass(frozen=True)
class _Mode:
    """Costs of all segments in one mode, by [i, j]: as in :class:`Costs`, with the forward's most bytes apart."""

    kept: Ints
    forward: Ints
    local: Ints
    seconds: NDArray[np.float64]


class SegmentCosts:
    """Costs of every segment (i, j) between two of the cuts.

    ``t`` ranges over operations, ``v`` over values, ``i`` and ``j`` over cuts. What is relative to K(i), the bytes kept
    before cut i, may be negative: kept values that a later segment alone uses are free by then.
    """

    def __init__(self, graph: Graph, cuts: Sequence[int] | None = None) -> None:
        cuts = graph.cuts if cuts is None else cuts
        ops = graph.operations
        self.graph = graph
        self.n = len(graph)
        self.cuts = np.array(cuts, np.int64)
        self.later = np.triu(np.ones((len(self.cuts),) * 2, bool), 1)  # [i, j]: j is after i
        self.inside = np.arange(self.n) >= self.cuts[:, None]  # [i, t]: t is at or after cut i

        self.size = np.array([v.bytes for v in graph.values], np.int64)
        self.output = np.array([v.is_output for v in graph.values], bool)
        self.saved = np.array(graph.first_savers, np.int64) < self.n
        self.producer = np.array(graph.producers, np.int64)
        self.last_use = np.array(graph.last_uses, np.int64)
        self.taken_over = np.zeros(len(graph.values), np.int64)
        self.taken_over[[op.takes_over for op in ops if op.takes_over is not None]] = 1
        self.saver = np.array(graph.first_savers, np.int64)
        # The first cut after a position: "before cut j" is j >= after, "at or after cut i" is i < after.
        self.made = self._after(self.producer)
        self.behind = self._after(np.arange(self.n))
        self.first_used = self._after(np.array(graph.first_uses, np.int64))
        self.passes = ~self.output & (np.array(graph.first_uses) < self.n)  # used, and not for good
        self.last_used = self._after(self.last_use)
        # Whether an operation reads what is written again behind it, so that it may ask for a writer behind.
        self.rewrites = any(graph.last_writes[v] > t for t, op in enumerate(ops) for v in op.reads)

        self.internal = np.array([op.internal_bytes for op in ops], np.int64)
        self.small = np.array(graph.keeps_internals, bool)
        self.scratch = np.array([op.scratch_bytes for op in ops], np.int64)
        self.gradient = np.array([op.gradient_bytes for op in ops], np.int64)
        self.backward_peak = np.array([op.backward_bytes for op in ops], np.int64)
        self.late_peak = np.array([op.late_bytes for op in ops], np.int64)
        self.seconds = np.array(graph.repeat_seconds)
        seen = prefix(np.array([op.saved_tensors for op in ops], np.int64))[self.cuts]
        # [i, j]: of the runtime, where the operations from cut i to j are one run.
        self.run_seconds = graph.runtime.run + graph.runtime.saved_tensor * np.maximum(0, seen[None, :] - seen[:, None])
        self.replayable = np.array([op.replayable for op in ops], bool)
        self.told = np.zeros(len(self.size), bool)  # values that are never made again, as the user told
        self.told[list(graph.told.saved)] = True
        in_recomputed = prefix(np.isin(np.arange(self.n), [*graph.told.in_recomputed]).astype(np.int64))[self.cuts]
        self.unsaved = in_recomputed[None, :] > in_recomputed[:, None]  # [i, j]: whether (i, j) must not be saved

    @cached_property
    def needed(self) -> Bools:
        """The values that stay because the user told it: those that are saved, or that some recomputation reads."""
        if not self.told.any():
            return self.told
        alive = self._alive(np.repeat(~self.told[:, None], len(self.cuts), 1), self.small)[:, -1]
        read = {v for op, runs in zip(self.graph.operations, alive, strict=True) if runs for v in op.reads}
        found = self.saved.copy()
        found[list(read)] = True
        return found & self.told

    def costs(self, *kept_values: Collection[int]) -> Costs:
        """The costs for the outermost level, with a mode for each set of values to keep."""
        producers = [tuple((v, int(self.producer[v])) for v in sorted(values)) for values in kept_values]
        shape = (2 + len(kept_values), *self.later.shape)
        kept, local, seconds = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape)
        # One after the other: each takes memory.
        for n, mode in enumerate(chain((self._whole, self._at_once), map(self._recomputed, kept_values))):
            kept[n], local[n], seconds[n] = mode.kept.T, np.maximum(mode.forward, mode.local).T, mode.seconds.T
        local[SAVED][self.unsaved.T] = NEVER
        return Costs(self.cuts, self.grain, kept, local, seconds, ((), (), *producers))

    @cached_property
    def nested(self) -> NestedCosts:
        """The costs for plans that may recompute a region in parts."""
        at_once = self._at_once
        # Values that cross j and are used before it are still there when (i, j) is recomputed, and all that are told.
        size, stays = np.where(self.output, 0, self.size), self.needed
        retained = self._sum_ij(
            (0, self.made, np.maximum(self.made, self.first_used), self.last_used, np.where(stays, 0, size)),
            (0, self.made, self.made, len(self.cuts), np.where(stays, size, 0)),
        )
        retained += self._internals(self.internal * self.small) + self._later_outputs()[:, None]
        once, before = self._asked
        sooner = self._sooner()
        # A region with an operation that must not run twice takes forever to recompute, unless what it makes stays.
        again = np.where(self.replayable, self.seconds, np.where(self._only_told, 0.0, np.inf))[:, None]
        saved_seconds, crossing_seconds = (
            self._from_cut(np.where(runs, again, 0.0)) for runs in (self._within(), self._crossing())
        )
        first = whole, crossing = self._whole.forward, at_once.forward
        if self.told.any():
            whole = self._forward(self.saved, self.internal, is_again=True)
            crossing = self._forward(stays, self.internal * self.small, is_again=True)
        return NestedCosts(
            cuts=self.cuts,
            grain=self.grain,
            kept=(self._whole.kept, at_once.kept),
            first=first[1],
            forward=(whole, crossing),
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
        """Costs of saved segments."""
        return _Mode(
            kept=self._kept(self.saved, self.internal),
            forward=self._forward(self.saved, self.internal),
            local=self._backward,
            seconds=np.broadcast_to(0.0, self.later.shape),
        )

    @cached_property
    def _at_once(self) -> _Mode:
        """Costs of segments that are recomputed at once."""
        return self._recomputed(())

    def _recomputed(self, values: Collection[int]) -> _Mode:
        """Costs of segments that are recomputed at once, but for these values, which stay."""
        stay = self.needed.copy()
        stay[list(values)] = True
        kept = np.array(self.graph.keeps_internals_with(values), bool)
        unkept = ~(stay | self.told)[:, None] & self._gone_at  # [v, j]: no copy at cut j
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

    def _forward(self, stay: Bools, internal: Ints, is_again: bool = False) -> Ints:
        """Most bytes alive in a run of a segment, above K(i), if these values and internals outlive it.

        ``is_again``, in one in which nothing is made that the user told to save.
        """
        until = np.where(stay, self.n, np.minimum(self.last_use + 1 - self.taken_over, self.n))
        size = np.where(self.told & is_again, 0, self.size)
        live = self._sum_it((0, self.made, self.producer, until, size))
        earlier = prefix(internal)
        live += earlier[:-1] + self.internal + self.scratch
        live -= earlier[self.cuts][:, None]
        return self._at_ends(self._most_until(live))

    @cached_property
    def _backward(self) -> Ints:
        """Most bytes alive in the backward of a segment, above K(i)."""
        return self._at_ends(self._backward_peaks)

    def _backward_from(self, asking: Ints) -> Ints:
        """[i, j]: most bytes alive above K(i) in the backward, once an operation has asked for recomputation."""
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

        # Once an operation has released what it saved, values that it alone saved are gone.
        late = np.where(self.late_peak > 0, self.late_peak, -NEVER)
        return self._most_until(np.maximum(live(self.saver, self.backward_peak), live(self.saver + 1, late)))

    def _alive(self, unkept: Bools, kept: Bools) -> Bools:
        """[t, j]: whether recomputation up to cut j runs operation t, as :class:`ogc.plan.schedule.Schedule` has it."""
        return self._needed(unkept & self.saved[:, None], unkept, (self.internal > 0) & ~kept)

    def _crossing(self) -> Bools:
        """[t, j]: whether operation t is needed to make the values that cross cut j."""
        c = np.arange(len(self.cuts))
        unkept = np.repeat(~self.told[:, None], len(c), 1)
        crosses = (self.made[:, None] <= c) & (c < self.last_used[:, None]) & unkept
        return self._needed(crosses, unkept, np.zeros(self.n, bool))

    @cached_property
    def _only_told(self) -> Bools:
        """The operations that only what the user told keeps from running again, and that nothing asks for then."""
        if not self.told.any():
            return np.zeros(self.n, bool)
        alive = self._alive(np.repeat(~self.told[:, None], len(self.cuts), 1), self.small).any(1)
        told = [bool(op.writes) and self.graph.told.saved.issuperset(op.writes) for op in self.graph.operations]
        return np.array(told) & ~alive

    def _needed(self, wanted: Bools, unkept: Bools, always: Bools) -> Bools:
        """[t, j]: whether operation t, before cut j, runs ``always`` or makes a value that is ``wanted`` [v, j].

        Wanted are also values that an operation which runs reads, if they are ``unkept`` or changed in place later.
        """
        alive = np.zeros((self.n, len(self.cuts)), bool)
        within = self._within()
        while True:
            before = int(alive.sum())
            for t in range(self.n - 1, -1, -1):
                op = self.graph.operations[t]
                runs = within[t] if always[t] else alive[t]
                for v in op.writes:
                    runs = runs | (wanted[v] & within[t])
                alive[t] = runs
                for v in op.reads:
                    wanted[v] |= runs if t <= self.graph.last_writes[v] else runs & unkept[v]
            if not self.rewrites or int(alive.sum()) == before:
                return alive

    def _recompute(self, alive: Bools, unkept: Bools, stay: Bools, kept: Bools, asking: Ints) -> Ints:
        """Most bytes alive while a segment is recomputed and before, above K(i); NEVER if it must not be.

        ``stay`` are the values that stay, ``kept`` the operations whose internal tensors do.
        """
        until = np.where(stay, len(self.cuts), self.last_used)
        base = self._sum_ij(
            (0, self.made, np.maximum(self.made, self.first_used), until, np.where(self.output, 0, self.size)),
            (self.made, self.first_used, 0, self.first_used, np.where(self.passes, -self.size, 0)),
        )
        base += self._internals(self.internal * kept) + self._later_outputs()[:, None]
        once, before = self._asked
        if stay.any():
            once, before = self._asked_for(asking, kept)
            once -= self._gone(self._only_saved(alive, stay))[asking, np.arange(len(self.cuts))]
        most = base + np.maximum(once + self._running(alive, unkept, kept), before)
        barred = np.flatnonzero(~self.replayable)
        last = np.where(alive[barred], barred[:, None], -1).max(0, initial=-1)  # [j]: of those that must not run twice
        return np.where(last >= self.cuts[:, None], NEVER, most)

    def _only_saved(self, alive: Bools, stay: Bools) -> Bools:
        """[v, j]: whether a value that stays is needed by no recomputed operation, and not beyond cut j."""
        found = (stay & ~self.output)[:, None] & (np.arange(len(self.cuts)) >= self.last_used[:, None])
        for op, idle in zip(self.graph.operations, ~alive, strict=True):
            for v in op.reads:
                found[v] &= idle
        return found

    @cached_property
    def _gone_at(self) -> Bools:
        """[v, j]: whether a value is used before cut j alone."""
        return np.arange(len(self.cuts)) >= self.last_used[:, None]

    @cached_property
    def _first_to_ask(self) -> Ints:
        """[i, j]: the result of :meth:`_first_asking` if only values used beyond the end stay, or told to."""
        return self._first_asking(self._gone_at & ~self.told[:, None], self.small)

    @cached_property
    def _asked(self) -> tuple[Ints, Ints]:
        """[i, j]: the result of :meth:`_asked_for` if only values used beyond the end stay."""
        return self._asked_for(self._first_to_ask, self.small)

    def _first_asking(self, unkept: Bools, kept: Bools) -> Ints:
        """[i, j]: the operation with the first backward that asks for something that (i, j) recomputes, or -1."""
        asking = np.full((len(self.cuts),) * 2, -1)
        for t, op in enumerate(self.graph.operations):  # ascending: the last that asks is the one that stays
            later = slice(self.behind[t], None)
            for v in op.saves:
                np.copyto(asking[self.made[v] - 1, later], t, where=unkept[v, later])
            if self.internal[t] and not kept[t]:
                asking[self.behind[t] - 1, later] = t
        return np.maximum.accumulate(asking[::-1])[::-1]  # what is made behind a cut is made behind those before it

    def _asked_for(self, asking: Ints, kept: Bools) -> tuple[Ints, Ints]:
        """[i, j]: bytes alive until the segment is recomputed, beside those kept: gradients, less internals gone.

        At the operation that asks for it, and the most in the backward of those behind, which ask for nothing.
        """
        internals = prefix(self.internal * kept)
        peaks = np.maximum(self.backward_peak, self.late_peak) + internals[1:]
        before = np.where(asking < 0, -NEVER, self._most_from(asking + 1, peaks) - internals[self.cuts])
        return (self.gradient + internals[1:])[asking] - internals[self.cuts], before

    def _sooner(self) -> Ints:
        """Bytes that gradients may be more, if (i, j) is the last part of what is recomputed for one behind."""
        gradients = self.gradient + prefix(self.internal * self.small)[1:]
        asking = self._first_to_ask
        return np.where(asking < 0, 0, self._most_from(asking, gradients) - gradients[asking])

    def _gone(self, only_saved: Bools) -> Ints:
        """[t, j]: bytes of the values that are made at or behind t, and only saved, by operations behind it."""
        gone = np.zeros((self.n, len(self.cuts)), np.int64)
        for v in np.flatnonzero(only_saved.any(1)):  # several times faster than numpy.add.at
            gone[min(self.producer[v], self.saver[v] - 1)] += only_saved[v] * self.size[v]
        cumsum_rows(gone[::-1])
        return gone

    def _running(self, alive: Bools, unkept: Bools, kept: Bools) -> Ints:
        """[i, j]: most bytes that the recomputation has made and still needs."""
        c = len(self.cuts)
        remade = alive[self.producer]  # [v, j]
        stays = remade & self.saved[:, None] & unkept
        grown = np.zeros((self.n + 1, c), np.int64)  # [t, j]: bytes that stay, made before t
        for stayed in np.flatnonzero(stays.any(1)):
            grown[self.producer[stayed] + 1] += stays[stayed] * self.size[stayed]
        for made in np.flatnonzero(np.where(kept, 0, self.internal)):
            grown[made + 1] += alive[made] * self.internal[made]
        cumsum_rows(grown)
        live = grown[1:] + (self.scratch + np.where(kept, self.internal, 0))[:, None]  # [t, j]
        np.copyto(live, -NEVER, where=~alive)
        ends = self._needed_until(alive, unkept)
        passing = remade & ~stays
        most = np.full((c, c), -NEVER)
        peaks = np.full(c, -NEVER)  # [j]: the largest of live; what an earlier start adds only raises it
        by_group: list[list[int]] = [[] for _ in range(c)]
        for v in np.flatnonzero(passing.any(1)).tolist():
            by_group[self.made[v] - 1].append(v)
        for i in range(c - 2, -1, -1):
            start, stop = int(self.cuts[i]), int(self.cuts[i + 1])
            for v in by_group[i]:
                first, last = int(self.producer[v]), int(ends[v].max())
                stop = max(stop, last + 1)
                needed = passing[v, i + 1 :] & (np.arange(first, last + 1)[:, None] <= ends[v, i + 1 :])
                live[first : last + 1, i + 1 :] += needed * self.size[v]
            np.maximum(peaks[i + 1 :], live[start:stop, i + 1 :].max(0), out=peaks[i + 1 :])
            most[i, i + 1 :] = peaks[i + 1 :] - grown[start, i + 1 :]
        return np.maximum(most, -NEVER, out=most)

    def _needed_until(self, alive: Bools, unkept: Bools) -> Ints:
        """[v, j]: the last operation of the recomputation that needs its copy of a passing value."""
        until = np.repeat(self.producer[:, None], len(self.cuts), 1)
        for t, op in enumerate(self.graph.operations):
            for v in op.reads:
                early = t <= self.graph.last_writes[v]
                needs = alive[t] if early else alive[t] & unkept[v]
                until[v, needs] = t - (v == op.takes_over)
        return until

    def _within(self) -> Bools:
        """[t, j]: whether operation t lies before cut j."""
        return np.arange(self.n)[:, None] < self.cuts

    def _later_outputs(self) -> Ints:
        """Bytes of outputs made at or after each cut: they stay through the backward."""
        c = np.arange(len(self.cuts))[:, None]
        return ((c < self.made) * np.where(self.output, self.size, 0)).sum(1)

    def _internals(self, per_operation: Ints) -> Ints:
        total = prefix(per_operation)[self.cuts]
        return total[None, :] - total[:, None]

    def _from_cut(self, per_operation: NDArray) -> NDArray:
        """[i, j]: sums of [t, j] over the operations at or after cut i."""
        total = np.zeros((self.n + 1, per_operation.shape[1]), np.float64)
        total[:-1] = per_operation
        cumsum_rows(total[::-1])
        return total[self.cuts]

    def _most_until(self, live: Ints) -> Ints:
        """[i, t]: the largest of [i, s] over the operations s from cut i to t; ``live`` is overwritten."""
        np.copyto(live, -NEVER, where=~self.inside)
        return np.maximum.accumulate(live, 1, out=live)

    def _at_ends(self, peaks: Ints) -> Ints:
        """[i, j]: the entry [i, t] of the last operation before cut j."""
        return np.where(self.later, peaks[:, np.maximum(self.cuts - 1, 0)], NEVER)

    def _most_from(self, positions: Ints, weights: Ints) -> Ints:
        """[i, j]: the largest weight of the operations from a position on and before cut j; -NEVER if there is none."""
        most = (np.maximum.accumulate(np.append(-NEVER, weights[:stop][::-1]))[::-1] for stop in self.cuts)
        return np.stack([here[rows] for here, rows in zip(most, positions.T, strict=True)], 1)

    def _sum_ij(self, *rectangles: Rectangles) -> Ints:
        return _cover((len(self.cuts), len(self.cuts)), rectangles)

    def _sum_it(self, *rectangles: Rectangles) -> Ints:
        return _cover((len(self.cuts), self.n), rectangles)

    def _after(self, positions: Ints) -> Ints:
        return np.searchsorted(self.cuts, positions, side="right")


def boundary_bytes(graph: Graph) -> Ints:
    """For each position from 0 to N, the bytes made before it and used at or after it."""
    change = np.zeros(len(graph) + 2, np.int64)
    for value, first, last in zip(graph.values, graph.producers, graph.last_uses, strict=True):
        change[first + 1] += value.bytes
        change[last + 1] -= value.bytes
    return np.cumsum(change)[:-1]


def prefix(weights: Ints) -> Ints:
    """Sums of the weights before each position, length + 1 of them."""
    return np.concatenate([[0], np.cumsum(weights)])


def cumsum_rows(numbers: NDArray) -> None:
    """``numpy.cumsum`` over the first axis in place, several times faster."""
    for before, row in pairwise(numbers):
        row += before


def _cover(shape: tuple[int, int], rectangles: Iterable[Rectangles]) -> Ints:
    """Sum of the weights whose half-open rectangle of rows and columns covers each cell."""
    corners = np.zeros((shape[0] + 1, shape[1] + 1), np.int64)
    for r_from, r_to, c_from, c_to, weights in rectangles:
        rows = [np.broadcast_to(np.minimum(r, shape[0]), weights.shape) for r in (r_from, r_to)]
        columns = [np.broadcast_to(np.minimum(c, shape[1]), weights.shape) for c in (c_from, c_to)]
        inside = np.where((rows[0] < rows[1]) & (columns[0] < columns[1]), weights, 0)
        for sign_r, row in zip((1, -1), rows, strict=True):
            for sign_c, column in zip((1, -1), columns, strict=True):
                cells = row * corners.shape[1] + column  # numpy adds by one index many times faster than by two
                np.add.at(corners.reshape(-1), cells, sign_r * sign_c * inside)
    cumsum_rows(corners)
    np.cumsum(corners, 1, out=corners)
    return corners[: shape[0], : shape[1]]

"""Recomputation of a segment at once: its operations, when it starts, and the bytes alive meanwhile."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .arrays import NEVER, Bools, Ints, ProgramArrays, cumsum_rows, prefix


class RecomputeCosts(ProgramArrays):
    """Segments (i, j) that are run again at once, for all i and j.

    Once the backward of one of its operations asks for something that a segment makes, with the gradients that are
    alive then, the whole segment is run again.
    """

    def _alive(self, unkept: Bools, kept: Bools) -> Bools:
        """[t, j]: whether a recomputation up to cut j runs operation t, as in :class:`ogc.plan.schedule.Schedule`."""
        return self._needed(unkept & self.saved[:, None], unkept, (self.internal > 0) & ~kept)

    def _crossing(self) -> Bools:
        """[t, j]: whether operation t is needed to make the values that cross cut j."""
        c = np.arange(len(self.cuts))
        crosses = (self.made[:, None] <= c) & (c < self.last_used[:, None])
        return self._needed(crosses, np.ones(crosses.shape, bool), np.zeros(self.n, bool))

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
        """Most bytes alive while a segment runs again and before, above K(i); NEVER if it must not.

        By the values that stay, the operations of which the internal tensors do, and those that ask for the rest.
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
        """[v, j]: whether a value that stays is needed by no operation that is run again, and not beyond cut j."""
        found = (stay & ~self.output)[:, None] & (np.arange(len(self.cuts)) >= self.last_used[:, None])
        for op, idle in zip(self.graph.operations, ~alive, strict=True):
            for v in op.reads:
                found[v] &= idle
        return found

    @cached_property
    def _first_to_ask(self) -> Ints:
        """[i, j]: the result of :meth:`_first_asking` if only values used beyond the end stay."""
        return self._first_asking(np.arange(len(self.cuts)) >= self.last_used[:, None], self.small)

    @cached_property
    def _asked(self) -> tuple[Ints, Ints]:
        """[i, j]: the result of :meth:`_asked_for` if only values used beyond the end stay."""
        return self._asked_for(self._first_to_ask, self.small)

    def _first_asking(self, unkept: Bools, kept: Bools) -> Ints:
        """[i, j]: the operation with the first backward that asks for something that (i, j) makes again, or -1."""
        asking = np.full((len(self.cuts),) * 2, -1)
        for t, op in enumerate(self.graph.operations):  # ascending: the last that asks is the one that stays
            later = slice(self.behind[t], None)
            for v in op.saves:
                np.copyto(asking[self.made[v] - 1, later], t, where=unkept[v, later])
            if self.internal[t] and not kept[t]:
                asking[self.behind[t] - 1, later] = t
        return np.maximum.accumulate(asking[::-1])[::-1]  # what is made behind a cut is made behind those before it

    def _asked_for(self, asking: Ints, kept: Bools) -> tuple[Ints, Ints]:
        """[i, j]: bytes alive until the segment runs again, beside those kept: gradients, less internal tensors gone.

        At the operation that asks for it, and the most in the backward of those behind, which ask for nothing.
        """
        internals = prefix(self.internal * kept)
        peaks = np.maximum(self.backward_peak, self.late_peak) + internals[1:]
        before = np.where(asking < 0, -NEVER, self._most_from(asking + 1, peaks) - internals[self.cuts])
        return (self.gradient + internals[1:])[asking] - internals[self.cuts], before

    def _sooner(self) -> Ints:
        """Bytes that gradients may be more, if (i, j) is the last part of what is run again for an operation behind."""
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
        """Most bytes that the program itself has made and still needs, for every (i, j)."""
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
        """[v, j]: the last operation of the program that needs the remade copy of a passing value."""
        until = np.repeat(self.producer[:, None], len(self.cuts), 1)
        for t, op in enumerate(self.graph.operations):
            for v in op.reads:
                early = t <= self.graph.last_writes[v]
                needs = alive[t] if early else alive[t] & unkept[v]
                until[v, needs] = t - (v == op.takes_over)
        return until

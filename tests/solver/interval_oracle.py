"""The rule that interval plans are chosen by, carried out event by event with sets: the solver's oracle.

Every cut keeps its whole boundary. A kept value is let go of by position: after the segment with its first use
has run again, or after the backward of its first saver. ``ogc.simulate`` lets go of values that no run
needs, so that it never counts more than this.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ogc.graph import SMALL_INTERNALS, Graph


@dataclass(frozen=True)
class Flat:
    """A segment of one level: recomputed, then but for the values of its own that it has ``kept``, or saved."""

    start: int
    stop: int
    recompute: bool
    retained: frozenset[int] = frozenset()
    program: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()


def flat_segments(
    graph: Graph, cuts: Sequence[int], modes: Sequence[int], keeping: Sequence[Collection[int]] = ()
) -> list[Flat]:
    """The segments between cuts, each saved (0), recomputed (1), or recomputed with values kept (2 and more)."""
    found = []
    for (start, stop), mode in zip(pairwise(cuts), modes, strict=True):
        inside = [v for v, t in enumerate(graph.producers) if start <= t < stop]
        kept = frozenset(keeping[mode - 2]).intersection(inside) if mode > 1 else frozenset()
        used = {v for op in graph.operations[start:stop] for v in (*op.reads, *op.saves)}
        retained = kept.union(v for v in inside if v in used and graph.last_uses[v] >= stop)
        program = recompute_program(graph, start, stop, kept) if mode else ()
        found.append(Flat(start, stop, bool(mode), retained, program, kept))
    return found


def weigh(graph: Graph, segments: Sequence[Flat]) -> tuple[int, float] | None:
    """Peak bytes and recomputed seconds by the rule; None if an operation would run twice that must not."""
    again = [t for s in segments for t in s.program]
    if not all(graph.operations[t].replayable for t in again):
        return None
    memory = Memory(graph, segments)
    for number in range(len(segments)):
        memory.forward(number)
    for number in range(len(segments) - 1, -1, -1):
        if segments[number].recompute:
            memory.recompute(number)
        memory.backward(number)
    return max(memory.totals), sum(_seconds(graph, t) for t in again)


def _seconds(graph: Graph, t: int) -> float:
    op = graph.operations[t]
    largest = max((graph.values[v].bytes for v in {*op.reads, *op.writes}), default=0)
    stays = op.internal_bytes > 0 and (not op.replayable or op.internal_bytes * SMALL_INTERNALS <= largest)
    return op.repeat_seconds if stays and op.repeat_seconds is not None else op.forward_seconds


def all_flat_plans(graph: Graph, keeping: Sequence[Collection[int]] = ()) -> Iterator[tuple[int, float]]:
    """Peak and seconds of every interval plan of one level that may run."""
    inner = graph.cuts[1:-1]
    for count in range(len(inner) + 1):
        for chosen in itertools.combinations(inner, count):
            cuts = [0, *chosen, len(graph)]
            for modes in itertools.product(range(2 + len(keeping)), repeat=len(cuts) - 1):
                found = weigh(graph, flat_segments(graph, cuts, modes, keeping))
                if found is not None:
                    yield found


def recompute_program(graph: Graph, start: int, stop: int, kept: Collection[int]) -> tuple[int, ...]:
    """The operations of [start, stop) that its backward needs run again.

    Given are the values made before ``start``, those used at or after ``stop`` and those ``kept``. An
    operation runs again if its backward needs internal tensors that are not kept, or if somebody needs a
    value that it writes. A value read before its last in-place write is needed as it was then, which no
    kept copy shows, so that it is remade.
    """
    remade = {
        v
        for t in range(start, stop)
        for v in graph.operations[t].saves
        if graph.producers[v] >= start and graph.last_uses[v] < stop and v not in kept
    }
    alive: set[int] = set()
    while True:
        before = len(alive)
        for t in range(stop - 1, start - 1, -1):
            op = graph.operations[t]
            remakes_internals = op.internal_bytes > 0 and not keeps_internals(graph, t, kept)
            if t in alive or not (remakes_internals or any(v in remade for v in op.writes)):
                continue
            alive.add(t)
            remade.update(
                v
                for v in op.reads
                if graph.producers[v] >= start
                and (t <= graph.last_writes[v] or (graph.last_uses[v] < stop and v not in kept))
            )
        if len(alive) == before:
            return tuple(sorted(alive))


def keeps_internals(graph: Graph, t: int, kept: Collection[int]) -> bool:
    """Whether a recomputed segment keeps an operation's internal tensors: with all that the operation writes."""
    writes = graph.operations[t].writes
    return graph.keeps_internals[t] or (bool(writes) and all(v in kept for v in writes))


class Memory:
    """Live bytes: forward copies (``live``), copies that a recompute made (``remade``), internals."""

    def __init__(self, graph: Graph, segments: Sequence[Flat]) -> None:
        self.graph = graph
        self.segments = segments
        self.totals: list[int] = []
        self.live: set[int] = set()
        self.remade: set[int] = set()
        self.internals: dict[int, int] = {}
        crossing = {v for s in segments[1:] for v in graph.boundary(s.start)}
        in_saved = {t for s in segments if not s.recompute for t in range(s.start, s.stop)}
        saved = {v for v, t in enumerate(graph.producers) if t in in_saved and graph.first_savers[v] < len(graph)}
        self.kept = crossing.union(saved, *(s.kept for s in segments))  # outlives the forward

    def forward(self, number: int) -> None:
        graph, segment = self.graph, self.segments[number]
        for t in range(segment.start, segment.stop):
            op = graph.operations[t]
            self.live.update(op.writes)
            if op.takes_over is not None and op.takes_over not in self.kept:
                self.live.discard(op.takes_over)
            self._record(op.internal_bytes + op.scratch_bytes)
            if not segment.recompute or keeps_internals(graph, t, segment.kept):
                self.internals[t] = op.internal_bytes
            self.live = {v for v in self.live if graph.last_uses[v] > t or v in self.kept}

    def recompute(self, number: int) -> None:
        graph, segment = self.graph, self.segments[number]
        self._release(segment.stop, -1)
        asking = self._first_to_ask(segment)
        over = 0  # internal tensors that are gone, as the backward of these operations is over
        for t in range(segment.stop - 1, asking, -1):
            if segment.program:
                self._record(max(graph.operations[t].backward_bytes, graph.operations[t].late_bytes) - over)
            over += self.internals.get(t, 0)
        read = {v for t in segment.program for v in graph.operations[t].reads}
        for v in segment.kept - read:  # only saved, by those operations
            outlives = graph.values[v].is_output or graph.last_uses[v] >= segment.stop
            if not outlives and graph.producers[v] >= asking and graph.first_savers[v] > asking:
                over += graph.values[v].bytes
        extra = graph.operations[asking].gradient_bytes - over
        last_needed = self._last_needed(segment)
        for t in segment.program:
            op = graph.operations[t]
            self.remade.update(op.writes)
            if op.takes_over is not None:
                self.remade.discard(op.takes_over)
            self._record(extra + op.internal_bytes + op.scratch_bytes)
            if not keeps_internals(graph, t, segment.kept):
                self.internals[t] = op.internal_bytes
            self.remade = {v for v in self.remade if last_needed.get(v, -1) > t}
        self.live |= self.remade
        self.remade = set()

    def _first_to_ask(self, segment: Flat) -> int:
        """The operation with the first backward that needs something that the segment makes again."""
        graph = self.graph
        return max(
            (
                t
                for t in range(segment.start, segment.stop)
                if (graph.operations[t].internal_bytes and not keeps_internals(graph, t, segment.kept))
                or any(
                    graph.producers[v] >= segment.start and v not in segment.retained for v in graph.operations[t].saves
                )
            ),
            default=segment.start,
        )

    def backward(self, number: int) -> None:
        graph, segment = self.graph, self.segments[number]
        first = self._first_to_ask(segment) if segment.program else segment.stop - 1  # what is behind it is over
        for t in range(first + 1, segment.stop):
            self.internals.pop(t, None)
        for t in range(first, segment.start - 1, -1):
            self._release(segment.start, t)
            self._record(graph.operations[t].backward_bytes)
            if graph.operations[t].late_bytes:
                self._release(segment.start, t - 1)
                self._record(graph.operations[t].late_bytes)
            self.internals.pop(t, None)

    def _release(self, holders_before: int, backward: int) -> None:
        """Keep what operations before ``holders_before`` use or backwards up to ``backward`` read."""
        graph = self.graph
        self.live = {
            v
            for v in self.live
            if graph.values[v].is_output or graph.first_uses[v] < holders_before or graph.first_savers[v] <= backward
        }

    def _last_needed(self, segment: Flat) -> dict[int, int]:
        """The last operation of the program that needs the remade copy of each value; N for a saved one."""
        graph, retained = self.graph, set(segment.retained)
        last: dict[int, int] = {}
        for t in segment.program:
            for v in graph.operations[t].reads:
                if v not in retained or t <= graph.last_writes[v]:
                    last[v] = t
        for t in range(segment.start, segment.stop):
            last.update((v, len(graph)) for v in graph.operations[t].saves if v not in retained)
        return last

    def _record(self, extra: int) -> None:
        values = self.graph.values
        total = sum(values[v].bytes for held in (self.live, self.remade) for v in held)
        self.totals.append(total + sum(self.internals.values()) + extra)

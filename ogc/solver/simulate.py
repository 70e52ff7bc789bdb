"""The judge: a replay of forward and backward that counts every live byte of a plan.

It shares no code with any solver, executes the plan event by event, and is in turn judged by the
allocator. What it counts: checkpoints until the segments that use them have run again, saved values until
the last backward that reads them, saved internal tensors, temporaries of each operation, the forward's
values that are still to be used, outputs, and the gradients alive during each backward. A value is
counted once however many hold it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import PlanError
from ..graph import Graph
from ..plan import Plan, Segment


@dataclass(frozen=True)
class Event:
    """One operation run in one phase, and the bytes alive while it ran."""

    phase: str  # "forward", "recompute" or "backward"
    segment: int
    operation: int
    bytes: int


@dataclass(frozen=True)
class Simulation:
    """What a plan costs: peak in bytes, recomputed time and FLOPs, and the timeline behind them."""

    peak_bytes: int
    recomputed_seconds: float
    recomputed_flops: int
    timeline: tuple[Event, ...]


def simulate(graph: Graph, plan: Plan | Iterable[Segment]) -> Simulation:
    """Replay one forward and backward of ``plan``.

    Args:
        graph: the weighted graph.
        plan: a plan, or its segments, for this graph.

    Returns:
        Peak bytes, the time (seconds) and FLOPs that are recomputed, and one event per operation run.

    Raises:
        PlanError: the segments do not cover the graph, or one runs an operation again that must not be.
    """
    segments = tuple(plan.segments if isinstance(plan, Plan) else plan)
    _check(graph, segments)
    memory = _Memory(graph, segments)
    for number in range(len(segments)):
        memory.forward(number)
    for number in range(len(segments) - 1, -1, -1):
        if segments[number].recompute:
            memory.recompute(number)
        memory.backward(number)
    again = [graph.operations[t] for s in segments for t in s.program]
    return Simulation(
        peak_bytes=max((event.bytes for event in memory.timeline), default=0),
        recomputed_seconds=sum(op.forward_seconds for op in again),
        recomputed_flops=sum(op.forward_flops for op in again),
        timeline=tuple(memory.timeline),
    )


def _check(graph: Graph, segments: tuple[Segment, ...]) -> None:
    edges = [0, *(s.stop for s in segments)]
    if [s.start for s in segments] != edges[:-1] or edges[-1] != len(graph):
        raise PlanError(f"the segments do not cover operations 0 to {len(graph) - 1} in order")
    for segment in segments:
        for t in segment.program:
            if not graph.operations[t].replayable:
                raise PlanError(f"operation {graph.operations[t].name} must not run twice")


class _Memory:
    """Live bytes: forward copies (``live``), copies that a recompute made (``remade``), internals."""

    def __init__(self, graph: Graph, segments: tuple[Segment, ...]) -> None:
        self.graph = graph
        self.segments = segments
        self.timeline: list[Event] = []
        self.live: set[int] = set()
        self.remade: set[int] = set()
        self.internals: dict[int, int] = {}
        crossing = {v for s in segments[1:] for v in graph.boundary(s.start)}
        in_saved = {t for s in segments if not s.recompute for t in range(s.start, s.stop)}
        saved = {v for v, t in enumerate(graph.producers) if t in in_saved and graph.first_savers[v] < len(graph)}
        self.kept = crossing | saved  # outlives the forward

    def forward(self, number: int) -> None:
        graph, segment = self.graph, self.segments[number]
        for t in range(segment.start, segment.stop):
            op = graph.operations[t]
            self.live.update(op.writes)
            if op.takes_over is not None and op.takes_over not in self.kept:
                self.live.discard(op.takes_over)
            self._record("forward", number, t, op.internal_bytes + op.scratch_bytes)
            if not segment.recompute or graph.keeps_internals[t]:
                self.internals[t] = op.internal_bytes
            self.live = {v for v in self.live if graph.last_uses[v] > t or v in self.kept}

    def recompute(self, number: int) -> None:
        graph, segment = self.graph, self.segments[number]
        self._release(segment.stop, -1)
        gradients = graph.operations[segment.stop - 1].gradient_bytes
        last_needed = self._last_needed(segment)
        for t in segment.program:
            op = graph.operations[t]
            self.remade.update(op.writes)
            if op.takes_over is not None:
                self.remade.discard(op.takes_over)
            self._record("recompute", number, t, gradients + op.internal_bytes + op.scratch_bytes)
            if not graph.keeps_internals[t]:
                self.internals[t] = op.internal_bytes
            self.remade = {v for v in self.remade if last_needed.get(v, -1) > t}
        self.live |= self.remade
        self.remade = set()

    def backward(self, number: int) -> None:
        graph, segment = self.graph, self.segments[number]
        for t in range(segment.stop - 1, segment.start - 1, -1):
            self._release(segment.start, t)
            self._record("backward", number, t, graph.operations[t].backward_bytes)
            self.internals.pop(t, None)

    def _release(self, holders_before: int, backward: int) -> None:
        """Keep what operations before ``holders_before`` use or backwards up to ``backward`` read."""
        graph = self.graph
        self.live = {
            v
            for v in self.live
            if graph.values[v].is_output or graph.first_uses[v] < holders_before or graph.first_savers[v] <= backward
        }

    def _last_needed(self, segment: Segment) -> dict[int, int]:
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

    def _record(self, phase: str, number: int, t: int, extra: int) -> None:
        values = self.graph.values
        total = sum(values[v].bytes for held in (self.live, self.remade) for v in held)
        self.timeline.append(Event(phase, number, t, total + sum(self.internals.values()) + extra))

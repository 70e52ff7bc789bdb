"""The judge: a replay of forward and backward that counts every live byte of a plan.

It shares no code with any solver and is in turn judged by the allocator. It goes through the steps of
:class:`ogc.schedule.Schedule` one by one and counts copies of values from the step that makes them to the
last that needs them, saved internal tensors, temporaries of each operation, outputs, and the gradients
alive during each backward. A value is counted once however many hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ..graph import Graph
from ..plan import Plan, Segment
from ..schedule import FORWARD, Schedule, Step


@dataclass(frozen=True)
class Event:
    """One operation run in one phase, and the bytes alive while it ran."""

    phase: str  # "forward", "recompute" or "backward"
    run: int  # number in Schedule.runs
    operation: int
    bytes: int


@dataclass(frozen=True)
class Simulation:
    """What a plan costs: peak in bytes, recomputed time and FLOPs, and the timeline behind them.

    ``peak_values`` are the values alive at the peak.
    """

    peak_bytes: int
    peak_values: tuple[int, ...]
    recomputed_seconds: float
    recomputed_flops: int
    timeline: tuple[Event, ...]

    @property
    def peak_event(self) -> Event:
        """The first event at the peak."""
        return max(self.timeline, key=lambda event: event.bytes)


def plain_peak(graph: Graph) -> int:
    """Simulated peak of the plain model in bytes: everything saved, every backward PyTorch's own."""
    if graph.plain_peak_bytes is not None:
        return graph.plain_peak_bytes
    operations = tuple(
        replace(op, backward_bytes=op.plain_bytes, late_bytes=0) if op.plain_bytes else op for op in graph.operations
    )
    return simulate(replace(graph, operations=operations), [Segment(0, len(graph))]).peak_bytes if len(graph) else 0


def lower_bound(graph: Graph) -> int:
    """Bytes below which no plan of any kind can peak, as long as operations are run whole."""
    return max(operation_bounds(graph), default=0)


def operation_bounds(graph: Graph) -> list[int]:
    """For each operation, the bytes that must be alive while it runs, whatever the plan.

    Its forward needs what it reads and writes; its backward needs what it saved, the gradients and
    temporaries alive then, which no plan changes; both need the outputs that the caller holds.
    """
    size = [value.bytes for value in graph.values]
    outputs = {v for v, value in enumerate(graph.values) if value.is_output}
    bounds = []
    for t, op in enumerate(graph.operations):
        given = {*op.reads, *op.writes} - {op.takes_over}
        given |= {v for v in outputs if graph.last_writes[v] < t}
        forward = sum(size[v] for v in given) + op.internal_bytes + op.scratch_bytes
        early = sum(size[v] for v in outputs | set(op.saves)) + op.backward_bytes
        late = sum(size[v] for v in outputs) + op.late_bytes
        bounds.append(max(forward, max(early, late) + op.internal_bytes))
    return bounds


def simulate(graph: Graph, plan: Plan | Iterable[Segment], remade: Collection[int] = ()) -> Simulation:
    """Replay one forward and backward of ``plan``.

    Args:
        graph: the weighted graph.
        plan: a plan, or its segments, for this graph.
        remade: as in :class:`ogc.Plan`, where only segments are given.

    Returns:
        Peak bytes, the time (seconds) and FLOPs that are recomputed, and one event per operation run.

    Raises:
        PlanError: the segments do not cover the graph, or one runs an operation again that must not be.
    """
    if isinstance(plan, Plan):
        remade, plan = plan.remade, plan.segments
    schedule = Schedule(graph, tuple(plan), remade)
    memory = _Memory(schedule)
    for number, step in enumerate(schedule.steps()):
        memory.take(number, step)
    again = [graph.operations[t] for run in schedule.runs[1:] for t in run.program]
    return Simulation(
        peak_bytes=max(memory.peak_bytes, 0),
        peak_values=memory.peak_values(),
        recomputed_seconds=sum(op.forward_seconds for op in again) + sum(op.again_seconds for op in graph.operations),
        recomputed_flops=sum(op.forward_flops for op in again) + sum(op.again_flops for op in graph.operations),
        timeline=tuple(memory.timeline),
    )


class _Memory:
    """The bytes alive from step to step."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.graph = schedule.graph
        self.timeline: list[Event] = []
        self.live: dict[tuple[int, int], int] = {}  # copies (run, value), and the event from which they are there
        self.live_bytes = 0
        self.internals: dict[int, int] = {}
        self.internal_bytes = 0
        self.peak_bytes = -1
        self.peak_event = 0
        self.gone: list[tuple[int, int, int]] = []  # (value, first event, event from which it is gone)

    def take(self, number: int, step: Step) -> None:
        """Carry out one step."""
        if step.is_backward:
            self._backward(number, step)
        else:
            self._forward(number, step)

    def _forward(self, number: int, step: Step) -> None:
        op, t = self.graph.operations[step.operation], step.operation
        for v in op.writes:
            self._add((step.run, v))
        if op.takes_over is not None and self.schedule.last_needs.get((step.run, op.takes_over)) == number:
            self._drop((step.run, op.takes_over))
        gradients = self.graph.operations[step.during].gradient_bytes if step.during is not None else 0
        phase = "recompute" if step.run else "forward"
        self._record(phase, step, gradients + op.internal_bytes + op.scratch_bytes)
        if step.run == self.schedule.keepers[t]:
            self.internals[t] = op.internal_bytes
            self.internal_bytes += op.internal_bytes
        for copy in (*self.schedule.reads(step), *((step.run, v) for v in op.writes)):
            self._drop_if_done(number, copy)

    def _backward(self, number: int, step: Step) -> None:
        op = self.graph.operations[step.operation]
        self._record("backward", step, op.backward_bytes)
        for copy in self.schedule.reads(step):
            self._drop_if_done(number, copy)
        if op.late_bytes:
            self._record("backward", step, op.late_bytes)
        self.internal_bytes -= self.internals.pop(step.operation, 0)

    def _add(self, copy: tuple[int, int]) -> None:
        if copy not in self.live:
            self.live[copy] = len(self.timeline)
            self.live_bytes += self.graph.values[copy[1]].bytes

    def _drop(self, copy: tuple[int, int]) -> None:
        if copy in self.live:
            self.gone.append((copy[1], self.live.pop(copy), len(self.timeline)))
            self.live_bytes -= self.graph.values[copy[1]].bytes

    def _drop_if_done(self, number: int, copy: tuple[int, int]) -> None:
        is_output = copy[0] == FORWARD and self.graph.values[copy[1]].is_output
        if self.schedule.last_needs[copy] == number and not is_output:
            self._drop(copy)

    def _record(self, phase: str, step: Step, extra: int) -> None:
        total = self.live_bytes + self.internal_bytes + extra
        self.timeline.append(Event(phase, step.run, step.operation, total))
        if total > self.peak_bytes:
            self.peak_bytes = total
            self.peak_event = len(self.timeline) - 1

    def peak_values(self) -> tuple[int, ...]:
        """The values alive at the first event at the peak."""
        peak = self.peak_event
        stayed = [v for (_, v), first in self.live.items() if first <= peak]
        return tuple(sorted(stayed + [v for v, first, gone in self.gone if first <= peak < gone]))

"""The simulator: a replay of forward and backward that counts every live byte of a plan.

It shares no code with any solver, and tests hold it against the allocator. Step by step of the schedule, it counts each
copy of a value from the step that makes it to the last that needs it, but not while it is offloaded; saved internal
tensors, temporaries of each operation, outputs, and the gradients alive during each backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from ..graph import Graph
from .decisions import Decided, Decisions, Segment, saved
from .queues import Queues
from .schedule import FORWARD, Schedule, Step

AnyMemory = TypeVar("AnyMemory", bound="Memory")


class Event(NamedTuple):
    """One operation run in one phase, and the bytes alive while it ran."""

    phase: str  # "forward", "recompute" or "backward"
    run: int  # number in Schedule.runs
    operation: int
    bytes: int


@dataclass(frozen=True)
class Simulation:
    """The cost of a plan: peak in bytes, time and FLOPs, and the timeline behind them.

    Attributes:
        peak_bytes: most bytes alive.
        peak_values: the values alive then.
        recomputed_seconds, recomputed_flops: of recomputation.
        runtime_seconds: what the plan takes beside: low-memory operators, and the runtime's own work.
        timeline: one event per operation run.
        waiting_seconds: what operations wait for copies of offloaded values.
        held_bytes: alive between the forward and the backward.
    """

    peak_bytes: int
    peak_values: tuple[int, ...]
    recomputed_seconds: float
    recomputed_flops: int
    runtime_seconds: float
    timeline: tuple[Event, ...]
    waiting_seconds: float = 0.0
    held_bytes: int = 0

    @property
    def added_seconds(self) -> float:
        """All that the plan adds to the plain step."""
        return self.recomputed_seconds + self.runtime_seconds + self.waiting_seconds

    @property
    def peak_event(self) -> Event:
        """The first event at the peak."""
        return max(self.timeline, key=lambda event: event.bytes)


def plain_peak(graph: Graph) -> int:
    """Simulated peak of the plain model in bytes: everything saved, every backward PyTorch's own."""
    if graph.plain_peak_bytes is not None:
        return graph.plain_peak_bytes
    return max(_plain(graph).peak_bytes, 0) if len(graph) else 0


def plain_timeline(graph: Graph) -> tuple[Event, ...] | None:
    """The events of the plain model; None where the graph's operations are not the plain model's."""
    if graph.plain_peak_bytes is not None:
        return None
    return tuple(_plain(graph).timeline) if len(graph) else ()


def _plain(graph: Graph) -> Memory:
    return replay(Memory(Schedule(graph.of_the_plain_model, Decisions((saved(0, len(graph)),)))))


def lower_bound(graph: Graph) -> int:
    """Bytes below which no plan of any kind can peak, with operations run whole, each in its best variant."""
    both = graph.with_variants(()), graph.with_variants(graph.low_memory)
    return max(map(min, *(one.operation_bounds for one in both)), default=0)


def simulate(graph: Graph, plan: Decided | Decisions | Iterable[Segment]) -> Simulation:
    """Replay one forward and backward of ``plan``.

    Args:
        graph: the weighted graph.
        plan: a plan, its decisions, or segments alone, for this graph.

    Returns:
        Peak bytes, the time (seconds) and FLOPs that the plan adds, and one event per operation run.

    Raises:
        PlanError: the segments do not cover the graph, or an operation would run twice that must not.
    """
    schedule = Schedule(graph, Decisions.of(plan))
    memory, planned = replay(Memory(schedule)), schedule.graph
    ops, again = planned.operations, [t for run in schedule.runs[1:] for t in run.program]
    return Simulation(
        peak_bytes=max(memory.peak_bytes, 0),
        peak_values=memory.peak_values(),
        recomputed_seconds=sum(planned.repeat_seconds[t] for t in again) + sum(op.again_seconds for op in ops),
        recomputed_flops=sum(ops[t].forward_flops for t in again) + sum(op.again_flops for op in ops),
        runtime_seconds=planned.step_seconds - graph.step_seconds + runtime_seconds(schedule),
        timeline=tuple(memory.timeline),
        waiting_seconds=Queues.of(schedule).waiting,
        held_bytes=memory.held_bytes,
    )


def runtime_seconds(schedule: Schedule) -> float:
    """Time of the host that a plan takes beside its operators, less what only the plain model does."""
    costs, ops = schedule.graph.runtime, schedule.graph.operations
    seen = sum(ops[t].saved_tensors for run in schedule.runs[1:] for a, b in run.saved for t in range(a, b))
    copies = schedule.graph.host.each * len(schedule.trips) if schedule.graph.host else 0.0
    return costs.choice + costs.run * (len(schedule.runs) - 1) + costs.saved_tensor * seen + copies - costs.left_out


def replay(memory: AnyMemory) -> AnyMemory:
    """Carry out all steps, beside those of other forwards whose backwards are still to come."""
    for number, step in enumerate(memory.schedule.steps):
        memory.take(number, step)
        if number == len(memory.graph) - 1:
            memory.held_bytes = memory.live_bytes + memory.internal_bytes
    memory.beside_others()
    return memory


class Memory:
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
        self.held_bytes = 0  # once the forward is done
        self.gone: list[tuple[int, int, int]] = []  # (value, first event, event from which it is gone)
        self.leaving: dict[int, list[int]] = {}  # the offloaded values that leave before a step, by its number
        self.returning: dict[int, list[int]] = {}
        for v, trip in schedule.trips.items():
            self.leaving.setdefault(trip.gone, []).append(v)
            self.returning.setdefault(trip.back, []).append(v)

    def take(self, number: int, step: Step) -> None:
        """Carry out one step."""
        self.leave(number)
        for v in self.returning.get(number, ()):
            self._add((FORWARD, v))
        (self._backward if step.is_backward else self._forward)(number, step)

    def beside_others(self) -> None:
        """Count what other forwards hold that are in flight."""
        others = (self.graph.in_flight - 1) * self.held_bytes
        if others:
            self.timeline = [event._replace(bytes=event.bytes + others) for event in self.timeline]
            self.peak_bytes += others

    def leave(self, number: int) -> None:
        """Drop the offloaded values that are gone before a step."""
        for v in self.leaving.get(number, ()):
            self._drop((FORWARD, v))

    def _forward(self, number: int, step: Step) -> None:
        op, t = self.graph.operations[step.operation], step.operation
        for v in op.writes:
            self._add((step.run, v))
        done = self.schedule.done[number]
        if op.takes_over is not None and (step.run, op.takes_over) in done:
            self._drop((step.run, op.takes_over))
        gradients = self.graph.operations[step.during].gradient_bytes if step.during is not None else 0
        phase = "recompute" if step.run else "forward"
        self._record(phase, step, gradients + op.internal_bytes + op.scratch_bytes)
        if step.run == self.schedule.keepers[t]:
            self.internals[t] = op.internal_bytes
            self.internal_bytes += op.internal_bytes
        self._drop_all(done)

    def _backward(self, number: int, step: Step) -> None:
        op = self.graph.operations[step.operation]
        self._record("backward", step, op.backward_bytes)
        self._drop_all(self.schedule.done[number])
        if op.late_bytes:
            self._record("backward", step, op.late_bytes)
        self.internal_bytes -= self.internals.pop(step.operation, 0)

    def _add(self, copy: tuple[int, int]) -> None:
        if copy not in self.live:
            self.live[copy] = len(self.timeline)
            self._count(copy, self.graph.values[copy[1]].bytes)

    def _drop(self, copy: tuple[int, int]) -> None:
        if copy in self.live:
            self.gone.append((copy[1], self.live.pop(copy), len(self.timeline)))
            self._count(copy, -self.graph.values[copy[1]].bytes)

    def _count(self, copy: tuple[int, int], change: int) -> None:
        """The bytes alive change by those of this copy."""
        self.live_bytes += change

    def _drop_all(self, copies: Iterable[tuple[int, int]]) -> None:
        """Drop these copies, but outputs of the model stay."""
        for run, value in copies:
            if run != FORWARD or not self.graph.values[value].is_output:
                self._drop((run, value))

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


@dataclass(frozen=True)
class Moment:
    """The bytes alive at one event, by kind; a value is counted once, however many hold it.

    Attributes:
        event: which operation ran, and all bytes alive.
        checkpoints: values of the forward that some recomputation starts from.
        recomputed: values and internal tensors of recomputation.
        saved: everything else that the forward made: saved tensors, outputs, values on their way to the next operation.
        gradients: gradients of activations that were there before the operation began.
        working: what the operation itself adds while it runs: temporaries, and gradients it is making.
    """

    event: Event
    checkpoints: int
    recomputed: int
    saved: int
    gradients: int
    working: int


def trace(graph: Graph, plan: Decided | Decisions | Iterable[Segment]) -> tuple[Moment, ...]:
    """The timeline of :func:`ogc.simulate`, with the bytes of each event by kind.

    Args:
        graph: the weighted graph.
        plan: a plan, its decisions, or segments alone, for this graph.

    Returns:
        One moment per event of ``simulate(graph, plan).timeline``; for a plan that ``is_plain``, of the plain model.

    Raises:
        PlanError: as :func:`ogc.simulate` does, or the plan is plain and the graph's operations are not the plain
            model's.
    """
    return tuple(replay(_Trace(Schedule.of_step(graph, plan, "it has no timeline of the plain model"))).moments)


class _Trace(Memory):
    """The bytes alive from step to step, by kind."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.moments: list[Moment] = []
        self.checkpoint_bytes = 0
        self.recomputed_bytes = 0

    def take(self, number: int, step: Step) -> None:
        """Carry out one step."""
        before = self.internal_bytes
        super().take(number, step)
        if self.schedule.keepers[step.operation] != FORWARD:
            self.recomputed_bytes += self.internal_bytes - before

    def beside_others(self) -> None:
        super().beside_others()
        moments = zip(self.moments, self.timeline, strict=True)
        self.moments = [replace(m, event=e, saved=m.saved + e.bytes - m.event.bytes) for m, e in moments]

    def _count(self, copy: tuple[int, int], change: int) -> None:
        super()._count(copy, change)
        if copy[0] != FORWARD:
            self.recomputed_bytes += change
        elif copy[1] in self.schedule.checkpoints:
            self.checkpoint_bytes += change

    def _record(self, phase: str, step: Step, extra: int) -> None:
        super()._record(phase, step, extra)
        op = self.graph.operations[step.operation]
        forward = again = 0  # internal tensors that are being made
        if step.is_backward:
            gradients = min(op.gradient_bytes, extra)
        elif step.run == FORWARD:
            gradients, forward = 0, op.internal_bytes
        else:
            assert step.during is not None
            gradients, again = self.graph.operations[step.during].gradient_bytes, op.internal_bytes
        saved = self.live_bytes + self.internal_bytes - self.checkpoint_bytes - self.recomputed_bytes + forward
        working, recomputed = extra - gradients - forward - again, self.recomputed_bytes + again
        self.moments.append(Moment(self.timeline[-1], self.checkpoint_bytes, recomputed, saved, gradients, working))

"""The judge: a replay of forward and backward that counts every live byte of a plan.

It shares no code with any solver and is in turn judged by the allocator. It goes through the steps of
:class:`ogc.plan.schedule.Schedule` one by one and counts copies of values from the step that makes them to the
last that needs them, saved internal tensors, temporaries of each operation, outputs, and the gradients
alive during each backward. A value is counted once however many hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ..errors import PlanError
from ..graph import Graph
from .plan import Plan, Segment
from .schedule import FORWARD, Run, Schedule, Step

AnyMemory = TypeVar("AnyMemory", bound="_Memory")


class Event(NamedTuple):
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


@dataclass(frozen=True)
class Moment:
    """What the bytes alive at one event are; a value is counted once, however many hold it.

    Attributes:
        event: which operation ran, and all bytes alive.
        checkpoints: values of the forward that some run again starts from.
        recomputed: values and internal tensors made by a run again.
        saved: everything else that the forward made: what saved segments need for their backward, outputs,
            and values on their way from one operation to the next.
        gradients: gradients of activations that were there before the operation began.
        working: what the operation itself adds while it runs: temporaries, and gradients it is making.
    """

    event: Event
    checkpoints: int
    recomputed: int
    saved: int
    gradients: int
    working: int


@dataclass(frozen=True)
class PartCost:
    """What a plan takes where the graph is one part of a model.

    What it returns goes on to the rest of the model, which holds it or does not: it is counted until the forward ends
    and, if the plan needs it afterwards, from there.

    Attributes:
        kept_bytes: alive between its forward and its backward.
        forward_bytes, backward_bytes: most bytes alive in its forward, and from there on.
        seconds: recomputed.
        gradient_bytes: gradients that are there when its backward starts, of all that it returns.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    gradient_bytes: int


def part_cost(graph: Graph, plan: Plan) -> PartCost:
    """What ``plan`` takes where the model that the graph was parsed from is a part of another.

    Raises:
        PlanError: as :func:`simulate` does.
    """
    memory = _Part(_schedule(graph.with_plain_operators if plan.is_plain else graph, plan, ()))
    _replay(memory)
    forward = [event.bytes for event in memory.timeline[: len(graph)]]
    behind = [event.bytes for event in memory.timeline[len(graph) :]]
    return PartCost(
        kept_bytes=memory.kept_bytes,
        forward_bytes=max(forward, default=0),
        backward_bytes=max(behind, default=0),
        seconds=plan.recomputed_seconds,
        gradient_bytes=memory.graph.operations[-1].gradient_bytes if len(graph) else 0,
    )


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


def _plain(graph: Graph) -> _Memory:
    return _replay(_Memory(Schedule(graph.with_plain_operators, (Segment(0, len(graph)),))))


def lower_bound(graph: Graph) -> int:
    """Bytes below which no plan of any kind can peak, as long as operations are run whole."""
    return max(graph.operation_bounds, default=0)


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
    schedule = _schedule(graph, plan, remade)
    memory = _replay(_Memory(schedule))
    again = [t for run in schedule.runs[1:] for t in run.program]
    return Simulation(
        peak_bytes=max(memory.peak_bytes, 0),
        peak_values=memory.peak_values(),
        recomputed_seconds=sum(graph.repeat_seconds[t] for t in again)
        + sum(op.again_seconds for op in graph.operations),
        recomputed_flops=sum(graph.operations[t].forward_flops for t in again)
        + sum(op.again_flops for op in graph.operations),
        timeline=tuple(memory.timeline),
    )


def trace(graph: Graph, plan: Plan | Iterable[Segment], remade: Collection[int] = ()) -> tuple[Moment, ...]:
    """The timeline of :func:`simulate`, with what the bytes of each event are.

    Args:
        graph: the weighted graph.
        plan: a plan, or its segments, for this graph. A plan that ``is_plain`` runs PyTorch's own backwards.
        remade: as in :class:`ogc.Plan`, where only segments are given.

    Returns:
        One moment per event of ``simulate(graph, plan).timeline``, the same events in the same order; for a plan
        that ``is_plain``, those of the plain model. Their largest total is the peak.

    Raises:
        PlanError: as :func:`simulate` does, or the plan is plain and the graph's operations are not the plain
            model's.
    """
    is_plain = isinstance(plan, Plan) and plan.is_plain
    if is_plain and graph.plain_peak_bytes is not None:
        raise PlanError("this graph runs slice by slice, so it has no timeline of the plain model")
    return tuple(_replay(_Trace(_schedule(graph.with_plain_operators if is_plain else graph, plan, remade))).moments)


def _schedule(graph: Graph, plan: Plan | Iterable[Segment], remade: Collection[int]) -> Schedule:
    if isinstance(plan, Plan):
        return Schedule(graph, plan.segments, plan.remade)
    return Schedule(graph, tuple(plan), remade)


def _replay(memory: AnyMemory) -> AnyMemory:
    """Carry out all steps."""
    for number, step in enumerate(memory.schedule.steps):
        memory.take(number, step)
    return memory


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
            self.live_bytes += self.graph.values[copy[1]].bytes

    def _drop(self, copy: tuple[int, int]) -> None:
        if copy in self.live:
            self.gone.append((copy[1], self.live.pop(copy), len(self.timeline)))
            self.live_bytes -= self.graph.values[copy[1]].bytes

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


class _Part(_Memory):
    """The same where the rest of the model decides how long the outputs stay."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.returned: list[tuple[int, int]] = []
        self.kept_bytes = 0

    def take(self, number: int, step: Step) -> None:
        """Carry out one step."""
        super().take(number, step)
        if number == len(self.graph) - 1:
            for copy in self.returned:
                self._drop(copy)
            self.kept_bytes = self.live_bytes + self.internal_bytes

    def _drop_all(self, copies: Iterable[tuple[int, int]]) -> None:
        """Drop these copies, but the outputs when the forward is over."""
        for run, value in copies:
            if run == FORWARD and self.graph.values[value].is_output and len(self.timeline) <= len(self.graph):
                self.returned.append((run, value))
            else:
                self._drop((run, value))


class _Trace(_Memory):
    """The bytes alive from step to step, and what they are."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.moments: list[Moment] = []
        self.kept = {v for run in schedule.runs[1:] for v in run.needs if _is_checkpoint(schedule, run, v)}
        self.kept_bytes = 0
        self.again_bytes = 0

    def take(self, number: int, step: Step) -> None:
        """Carry out one step."""
        before = self.internal_bytes
        super().take(number, step)
        if self.schedule.keepers[step.operation] != FORWARD:
            self.again_bytes += self.internal_bytes - before

    def _add(self, copy: tuple[int, int]) -> None:
        before = self.live_bytes
        super()._add(copy)
        self._count(copy, self.live_bytes - before)

    def _drop(self, copy: tuple[int, int]) -> None:
        before = self.live_bytes
        super()._drop(copy)
        self._count(copy, self.live_bytes - before)

    def _count(self, copy: tuple[int, int], change: int) -> None:
        if copy[0] != FORWARD:
            self.again_bytes += change
        elif copy[1] in self.kept:
            self.kept_bytes += change

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
        moment = Moment(
            event=self.timeline[-1],
            checkpoints=self.kept_bytes,
            recomputed=self.again_bytes + again,
            saved=self.live_bytes + self.internal_bytes - self.kept_bytes - self.again_bytes + forward,
            gradients=gradients,
            working=extra - gradients - forward - again,
        )
        self.moments.append(moment)


def _is_checkpoint(schedule: Schedule, run: Run, value: int) -> bool:
    assert run.parent is not None
    return schedule.source(run.parent, value) == FORWARD

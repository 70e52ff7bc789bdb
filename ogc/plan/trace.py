"""Memory over a step by kind: checkpoints, other saved values, recomputed ones, gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..graph import Graph
from .decisions import Decided, Decisions, Segment
from .schedule import FORWARD, Schedule, Step
from .simulate import Event, Memory, replay


@dataclass(frozen=True)
class Moment:
    """The bytes alive at one event, by kind; a value is counted once, however many hold it.

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


def trace(graph: Graph, plan: Decided | Decisions | Iterable[Segment]) -> tuple[Moment, ...]:
    """The timeline of :func:`ogc.simulate`, with the bytes of each event by kind.

    Args:
        graph: the weighted graph.
        plan: a plan, its decisions, or segments alone, for this graph.

    Returns:
        One moment per event of ``simulate(graph, plan).timeline``, the same events in the same order; for a plan
        that ``is_plain``, those of the plain model. Their largest total is the peak.

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

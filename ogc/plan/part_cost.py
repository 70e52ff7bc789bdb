"""The cost of a plan for one part of a model, as the rest of the model has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..graph import Graph
from .plan import Plan
from .schedule import FORWARD, Schedule, Step
from .simulate import Memory, replay


@dataclass(frozen=True)
class PartCost:
    """The cost of a plan where its graph is one part of a model.

    Outputs go on to the rest of the model, which holds them or does not: they are counted until the forward ends
    and, if the plan needs them afterwards, from there.

    Attributes:
        kept_bytes: alive between its forward and its backward.
        forward_bytes, backward_bytes: most bytes alive in its forward, and from there on.
        seconds: that the plan adds.
        gradient_bytes: gradients of its outputs, which are there when its backward starts.
        beyond_bytes: those kept that no backward of the plain model asks for.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    gradient_bytes: int
    beyond_bytes: int = 0


def part_cost(graph: Graph, plan: Plan) -> PartCost:
    """The cost of ``plan`` where the model that the graph was parsed from is a part of another.

    Raises:
        PlanError: as :func:`ogc.simulate` does.
    """
    memory = replay(_Part(Schedule(graph.of_the_plain_model if plan.is_plain else graph, plan.decisions)))
    sizes = [event.bytes for event in memory.timeline]
    return PartCost(
        kept_bytes=memory.kept_bytes,
        forward_bytes=max(sizes[: len(graph)], default=0),
        backward_bytes=max(sizes[len(graph) :], default=0),
        seconds=plan.added_seconds,
        gradient_bytes=memory.graph.operations[-1].gradient_bytes if len(graph) else 0,
        beyond_bytes=memory.beyond_bytes,
    )


class _Part(Memory):
    """The bytes alive from step to step where the rest of the model decides how long the outputs stay."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.returned: list[tuple[int, int]] = []
        self.kept_bytes = self.beyond_bytes = 0

    def take(self, number: int, step: Step) -> None:
        """Carry out one step."""
        super().take(number, step)
        if number == len(self.graph) - 1:
            for copy in self.returned:
                self._drop(copy)
            self.kept_bytes = self.live_bytes + self.internal_bytes
            saved = {v for op in self.graph.of_the_plain_model.operations for v in op.saves}
            self.beyond_bytes = sum(self.graph.values[v].bytes for _, v in self.live if v not in saved)

    def _drop_all(self, copies: Iterable[tuple[int, int]]) -> None:
        """Drop these copies, but the outputs when the forward is over."""
        for run, value in copies:
            if run == FORWARD and self.graph.values[value].is_output and len(self.timeline) <= len(self.graph):
                self.returned.append((run, value))
            else:
                self._drop((run, value))

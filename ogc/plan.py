"""The plan: which stretches of the program are saved and which are recomputed. Plain frozen data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .errors import PlanError
from .graph import Graph, table


@dataclass(frozen=True)
class Segment:
    """Operations ``start`` to ``stop - 1``, between two cuts.

    Attributes:
        recompute: True: nothing but checkpoints is kept until the backward, which runs ``program`` first.
            False: run as plain autograd does.
        checkpoints: values made before ``start`` that the segment's operations use.
        retained: values made in the segment that later segments keep, so that it need not remake them.
        program: operations to run again, in order; those whose results nobody needs are left out.
    """

    start: int
    stop: int
    recompute: bool
    checkpoints: tuple[int, ...] = ()
    retained: tuple[int, ...] = ()
    program: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Segments that cover the program, with what the simulator says of them.

    Attributes:
        segments: in program order.
        peak_bytes: simulated peak of live activations over forward and backward.
        plain_peak_bytes: the same for the model without checkpoints.
        step_seconds, step_flops: of the plain step (forward and backward).
        recomputed_seconds, recomputed_flops: what the plan adds to it.
        solver: the name of the solver that chose it.
    """

    segments: tuple[Segment, ...]
    peak_bytes: int
    plain_peak_bytes: int
    step_seconds: float
    step_flops: int
    recomputed_seconds: float
    recomputed_flops: int
    solver: str = ""
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def overhead(self) -> float:
        """Recomputed time over the time of the plain step."""
        return self.recomputed_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def flops_overhead(self) -> float:
        """Recomputed floating-point operations over those of the plain step."""
        return self.recomputed_flops / self.step_flops if self.step_flops else 0.0

    @property
    def is_plain(self) -> bool:
        """Whether nothing is recomputed, so that the plan is the plain model."""
        return not any(segment.recompute for segment in self.segments)

    def __str__(self) -> str:
        summary = (
            f"peak {self.peak_bytes / 1e6:.1f} MB (plain {self.plain_peak_bytes / 1e6:.1f} MB), "
            f"overhead {self.overhead:.1%}, {len(self.segments)} segments"
        )
        header = ["segment", "operations", "modules", "mode", "kept MB", "recomputed"]
        return f"{table(header, self.rows)}\n{summary}"


def cut_into_segments(graph: Graph, cuts: Sequence[int], recompute: Sequence[bool]) -> tuple[Segment, ...]:
    """Segments between consecutive ``cuts`` (0 and N included), each recomputed or saved.

    Raises:
        PlanError: the cuts are not allowed positions of the graph in ascending order.
    """
    allowed = set(graph.cuts)
    if not cuts or cuts[0] != 0 or cuts[-1] != len(graph) or len(recompute) != len(cuts) - 1:
        raise PlanError(f"cuts must run from 0 to {len(graph)} with one flag per segment, not {cuts}")
    for a, b in pairwise(cuts):
        if not a < b or b not in allowed:
            raise PlanError(f"position {b} is no cut of this graph after {a}; see Graph.cuts")
    return tuple(
        _segment(graph, a, b) if again else Segment(a, b, False)
        for (a, b), again in zip(pairwise(cuts), recompute, strict=True)
    )


def _segment(graph: Graph, start: int, stop: int) -> Segment:
    inside = range(start, stop)
    used = {v for t in inside for v in (*graph.operations[t].reads, *graph.operations[t].saves)}
    return Segment(
        start,
        stop,
        True,
        checkpoints=tuple(sorted(v for v in used if graph.producers[v] < start)),
        retained=tuple(sorted(v for v in used if graph.producers[v] >= start and graph.last_uses[v] >= stop)),
        program=recompute_program(graph, start, stop),
    )


def recompute_program(graph: Graph, start: int, stop: int) -> tuple[int, ...]:
    """The operations of [start, stop) that its backward needs run again.

    Given are the values made before ``start`` and those used at or after ``stop``: both are kept. An
    operation runs again if its backward needs internal tensors that are not kept, or if somebody needs a
    value that it writes. A value read before its last in-place write is needed as it was then, which no
    kept copy shows, so that it is remade.
    """
    remade = {
        v
        for t in range(start, stop)
        for v in graph.operations[t].saves
        if graph.producers[v] >= start and graph.last_uses[v] < stop
    }
    alive: set[int] = set()
    while True:
        before = len(alive)
        for t in range(stop - 1, start - 1, -1):
            op = graph.operations[t]
            remakes_internals = op.internal_bytes > 0 and not graph.keeps_internals[t]
            if t in alive or not (remakes_internals or any(v in remade for v in op.writes)):
                continue
            alive.add(t)
            remade.update(
                v
                for v in op.reads
                if graph.producers[v] >= start and (t <= graph.last_writes[v] or graph.last_uses[v] < stop)
            )
        if len(alive) == before:
            return tuple(sorted(alive))

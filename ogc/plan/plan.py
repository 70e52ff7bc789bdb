"""The plan: which stretches of the program are saved and which are run again. Plain frozen data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..graph import Graph, table

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .schedule import Schedule


@dataclass(frozen=True, order=True)
class Segment:
    """Operations ``start`` to ``stop - 1``, between two cuts.

    Without ``parts`` the segment is saved: it runs as under plain autograd. With them it is recomputed:
    its first run keeps only what later segments need, and before its backward it is run again as its
    parts say, each of which may in turn be saved or recomputed. One level of checkpointing is a segment
    with one saved part. Its first run may also keep some values that only it needs, ``kept``: what makes
    them is then not run again.
    """

    start: int
    stop: int
    parts: tuple[Segment, ...] = ()
    kept: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """How many times the deepest part is run again."""
        return 1 + max(part.depth for part in self.parts) if self.parts else 0


def saved(start: int, stop: int) -> Segment:
    """A segment that is kept as plain autograd keeps it."""
    return Segment(start, stop)


def recomputed(start: int, stop: int, *parts: Segment, kept: Iterable[int] = ()) -> Segment:
    """A segment that is run again, through ``parts`` or, without them, at once, but for the values ``kept``."""
    return Segment(start, stop, parts or (Segment(start, stop),), tuple(sorted(kept)))


@dataclass(frozen=True)
class Plan:
    """Segments that cover the program, with what the simulator says of them.

    Attributes:
        segments: in program order.
        peak_bytes: simulated peak of live activations over forward and backward.
        plain_peak_bytes: the same for the model without checkpoints.
        lower_bound: bytes below which no plan of any kind can peak.
        step_seconds, step_flops: of the plain step (forward and backward).
        recomputed_seconds, recomputed_flops: what the plan adds to it.
        solver: the name of the solver that chose it.
        is_plain: whether the model itself should be run: no plan was needed, or none is better.
        remade: values that are not kept where they cross a cut: what needs them later makes them again.
        budget_bytes: the memory budget that was asked for, if one was.
        graph: what the plan was made for; pickled and copied without its program.
    """

    segments: tuple[Segment, ...]
    peak_bytes: int
    plain_peak_bytes: int
    lower_bound: int
    step_seconds: float
    step_flops: int
    recomputed_seconds: float
    recomputed_flops: int
    solver: str = ""
    is_plain: bool = False
    remade: tuple[int, ...] = ()
    budget_bytes: int | None = None
    graph: Graph | None = field(default=None, compare=False, repr=False)

    @cached_property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The segments as they are printed, those of a sub-plan below it; none without a graph."""
        from .schedule import Schedule

        if self.graph is None:
            return ()
        return tuple(_rows(self.graph, Schedule(self.graph, self.segments, self.remade), self.segments))

    @property
    def overhead(self) -> float:
        """Recomputed time over the time of the plain step."""
        return self.recomputed_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def flops_overhead(self) -> float:
        """Recomputed floating-point operations over those of the plain step."""
        return self.recomputed_flops / self.step_flops if self.step_flops else 0.0

    @property
    def gap(self) -> float:
        """How far the peak is above the lower bound, as a share of the bound."""
        return self.peak_bytes / self.lower_bound - 1 if self.lower_bound else 0.0

    def plot(self, path: str | PathLike[str] | None = None, *, ax: Axes | None = None) -> Figure:
        """The memory of one step, operation by operation, as the simulator has it: what is alive, and of what kind.

        Args:
            path: where to save the picture, ending in .png, .svg or .pdf.
            ax: matplotlib axes to draw on, instead of a new figure.

        Raises:
            DependencyError: matplotlib is not installed.
            InputError: the path ends otherwise.
            PlanError: the plan has no graph, or is plain where the graph is not the plain model's.
        """
        from .plots import plot_plan

        return plot_plan(self, path, ax)

    def draw(self, path: str | PathLike[str] | None = None, *, ax: Axes | None = None) -> Figure:
        """The graph from top to bottom: operations in order, segments as bands, checkpoints marked.

        Args:
            path: where to save the picture, ending in .png, .svg or .pdf.
            ax: matplotlib axes to draw on, instead of a new figure.

        Raises:
            DependencyError: matplotlib is not installed.
            InputError: the path ends otherwise.
            PlanError: the plan has no graph.
        """
        from .plots import draw_plan

        return draw_plan(self, path, ax)

    def __getstate__(self) -> dict[str, Any]:
        graph = self.graph and replace(self.graph, program=None)
        return {**vars(self), "graph": graph}

    def __str__(self) -> str:
        summary = (
            f"peak {self.peak_bytes / 1e6:.1f} MB (plain {self.plain_peak_bytes / 1e6:.1f} MB, no plan below "
            f"{self.lower_bound / 1e6:.1f} MB), overhead {self.overhead:.1%}, {len(self.rows)} segments"
        )
        header = ["segment", "operations", "modules", "mode", "kept MB", "recomputed"]
        return f"{table(header, self.rows)}\n{summary}"


def _rows(
    graph: Graph, schedule: Schedule, segments: Sequence[Segment], number: int = 0, prefix: str = ""
) -> Iterator[tuple[str, ...]]:
    """A row per segment, those of a sub-plan indented below it."""
    children = iter(schedule.runs[number].children)
    for place, segment in enumerate(segments):
        inside = graph.operations[segment.start : segment.stop]
        modules = list(dict.fromkeys(op.module for op in inside if op.module))
        span = modules[0] if len(modules) == 1 else f"{modules[0]} … {modules[-1]}" if modules else ""
        name, mode, share = f"{prefix}{place}", "saved", "-"
        kept = {v for op in inside for v in op.saves}
        if segment.parts:
            child = next(children)
            run = schedule.runs[child]
            seconds = sum(op.forward_seconds for op in inside)
            again = sum(graph.repeat_seconds[t] for t in run.program)
            mode, share = "recomputed", f"{again / seconds:.0%}" if seconds else "-"
            kept = set(run.needs)
        size = sum(graph.values[v].bytes for v in kept)
        yield (name, f"{segment.start}-{segment.stop - 1}", span, mode, f"{size / 1e6:.2f}", share)
        if len(segment.parts) > 1:
            yield from _rows(graph, schedule, segment.parts, child, f"{name}.")


def cut_into_segments(cuts: Sequence[int], recompute: Sequence[bool]) -> tuple[Segment, ...]:
    """Segments between consecutive ``cuts``, each recomputed at once or saved."""
    return tuple(
        recomputed(a, b) if again else saved(a, b) for (a, b), again in zip(pairwise(cuts), recompute, strict=True)
    )


def check_segments(graph: Graph, segments: Sequence[Segment]) -> None:
    """Raise PlanError unless the segments cover the graph and are cut where it may be cut, at every level."""
    allowed = set(graph.cuts)
    _check_level(graph, allowed, segments, 0, len(graph))


def _check_level(graph: Graph, allowed: set[int], segments: Sequence[Segment], start: int, stop: int) -> None:
    edges = [start, *(s.stop for s in segments)]
    if [s.start for s in segments] != edges[:-1] or edges[-1] != stop:
        raise PlanError(f"the segments do not cover operations {start} to {stop - 1} in order")
    for segment in segments:
        if segment.stop <= segment.start or segment.stop not in allowed:
            raise PlanError(f"position {segment.stop} is no cut of this graph after {segment.start}; see Graph.cuts")
        for v in segment.kept:
            made = 0 <= v < len(graph.values) and segment.start <= graph.producers[v] < segment.stop
            if not (made and segment.parts):
                raise PlanError(f"segment {segment.start}-{segment.stop - 1} does not make value {v} again")
        if segment.parts:
            _check_level(graph, allowed, segment.parts, segment.start, segment.stop)

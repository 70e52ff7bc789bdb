"""Plans, which are decisions with their simulated cost, and frontiers, which are plans; made, loaded and printed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InputError, PlanError, optional
from ..graph import MIB, Graph, price, table
from .decisions import Decisions, Offload, Segment, saved
from .saving import WHOLE, Fingerprint, SavedDecisions, SavedPlan, saved_decisions, torch_version
from .schedule import Schedule
from .simulate import lower_bound, plain_peak, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .bounds import Gap

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """Decisions for a graph, with their simulated cost.

    Attributes:
        decisions: the segments and the policies of single values.
        peak_bytes: simulated peak of live activations over forward and backward.
        plain_peak_bytes: simulated peak of the model without checkpoints.
        lower_bound: bytes below which no plan of any kind can peak.
        step_seconds, step_flops: of the plain step (forward and backward).
        recomputed_seconds, recomputed_flops: what recomputation adds to it.
        runtime_seconds: what the plan adds beside: low-memory operators, and the runtime's own work.
        waiting_seconds: what operations wait for copies of offloaded values.
        solver: the name of the solver that chose it.
        budget_bytes: the memory budget that was asked for, if one was.
        max_overhead: the overhead that was asked for, if one was.
        floor: bytes and added seconds of the plan with the least peak, where it was looked for.
        free: the same of the plan for this goal where nothing is told, if something was.
        graph: what the plan was made for; pickled and copied without its program.
    """

    decisions: Decisions
    peak_bytes: int
    plain_peak_bytes: int
    lower_bound: int
    step_seconds: float
    step_flops: int
    recomputed_seconds: float
    recomputed_flops: int
    runtime_seconds: float = 0.0
    solver: str = ""
    budget_bytes: int | None = None
    max_overhead: float | None = field(default=None, compare=False)
    floor: tuple[int, float] | None = field(default=None, compare=False)
    free: tuple[int, float] | None = field(default=None, compare=False)
    graph: Graph | None = field(default=None, compare=False, repr=False)
    waiting_seconds: float = 0.0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that are saved or recomputed, in program order."""
        return self.decisions.segments

    @property
    def recomputed_values(self) -> tuple[int, ...]:
        """The values that are not saved where they cross a cut, but recomputed for what needs them later."""
        return self.decisions.recomputed_values

    @property
    def is_plain(self) -> bool:
        """Whether the model itself should be run: no plan was needed, or none is better."""
        return self.decisions.is_plain

    @property
    def low_memory(self) -> tuple[int, ...]:
        """The operations that run as their low-memory variant; all others are PyTorch's own operators."""
        return self.decisions.low_memory

    @property
    def offloaded(self) -> tuple[Offload, ...]:
        """The values that leave the device's memory between forward and backward, and when."""
        return self.decisions.offloaded

    def deciding(self, decisions: Decisions, solver: str) -> Plan:
        """The plan of other decisions for the same graph, weighed by the simulator."""
        cost = simulate(self._known_graph, decisions)
        return replace(
            self,
            decisions=decisions,
            peak_bytes=cost.peak_bytes,
            recomputed_seconds=cost.recomputed_seconds,
            recomputed_flops=cost.recomputed_flops,
            runtime_seconds=cost.runtime_seconds,
            waiting_seconds=cost.waiting_seconds,
            solver=solver,
        )

    @property
    def added_seconds(self) -> float:
        """All that the plan adds to the plain step."""
        return self.recomputed_seconds + self.runtime_seconds + self.waiting_seconds

    @property
    def overhead(self) -> float:
        """Time that the plan adds, recomputation, waiting and the runtime's own, over that of the plain step."""
        return self.added_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def summary(self) -> str:
        """Its price in one line: peak and time, and what the least peak would cost if that is known."""
        seconds = self.added_seconds, self.step_seconds
        return price(self.peak_bytes, self.plain_peak_bytes, *seconds, self.floor, self.free)

    @property
    def flops_overhead(self) -> float:
        """Recomputed floating-point operations over those of the plain step."""
        return self.recomputed_flops / self.step_flops if self.step_flops else 0.0

    @cached_property
    def gap(self) -> Gap:
        """How far it may be from the best plan: in ``bytes`` from the best as fast, in ``time`` from the best as small.

        What was asked for counts: the budget where there was one, else the plan's own peak, and so with time. Shares;
        ``overhead`` is that of the added time alone. Linear programs prove it when it is first asked for, in seconds;
        the plan prints it from then on.

        Raises:
            DependencyError: scipy is not installed.
            PlanError: the plan has no graph, or it offloads.
        """
        from .bounds import Bounds, Gap

        if self.offloaded:
            raise PlanError("the gap is to plans that offload nothing, and this one does; there is no bound for those")
        bounds, asked = Bounds(self._known_graph, self.decisions), (self.max_overhead or 0.0) * self.step_seconds
        return Gap(
            self.peak_bytes,
            self.added_seconds,
            bounds.least_bytes(max(self.added_seconds, asked)),
            bounds.least_seconds(max(self.peak_bytes, self.budget_bytes or 0)),
            self.step_seconds,
        )

    def memory(
        self,
        *,
        expandable_segments: bool = False,
        max_split_size_mb: int | None = None,
        roundup_power2_divisions: int | None = None,
    ) -> Any:
        """What CUDA's caching allocator would give and reserve for a step, by a model of it; also for other devices.

        Args:
            expandable_segments, max_split_size_mb, roundup_power2_divisions: as ``PYTORCH_ALLOC_CONF`` has them.

        Returns:
            Peaks of bytes requested, allocated and reserved, by the plan and by the plain model; printed, a table.

        Raises:
            InputError: PyTorch would not take one of the settings.
            PlanError: the plan has no graph, or is plain where the graph is not the plain model's.
        """
        settings = optional("sizing.allocator").AllocatorSettings(
            expandable_segments, max_split_size_mb, roundup_power2_divisions
        )
        return optional("sizing.requests").memory_peaks(self._known_graph, self.decisions, settings)

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write the simulated step as a memory snapshot of CUDA, for pytorch.org/memory_viz and its like.

        Device 0 is the step by the plan, device 1 the plain model's, where that is known. Bytes are those requested: at
        most :attr:`peak_bytes` are alive. Frames are the line, the modules and the phase that allocate.

        Args:
            path: of the file, a pickle.

        Raises:
            OSError: the file cannot be written.
            PlanError: the plan has no graph, or is plain where the graph is not the plain model's.
        """
        optional("sizing.snapshots").write_snapshot(self._known_graph, self.decisions, path)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that shows the plan in a browser: one file of at most 1 MB, which loads nothing.

        It has the memory of one step by the plan and by the plain model, to zoom into; the tables of ``print(plan)``;
        and what is kept, recomputed and offloaded, value by value.

        Args:
            path: of the file.

        Raises:
            OSError: the file cannot be written.
            PlanError: the plan has no graph, or is plain where the graph is not the plain model's.
        """
        optional("looking.page").write_page(self._known_graph, self, path)

    def plot(self, path: str | os.PathLike[str] | None = None, *, ax: Axes | None = None) -> Figure:
        """The memory of one step, operation by operation, as the simulator has it: what is alive, and of what kind.

        Args:
            path: where to save the picture, ending in .png, .svg or .pdf.
            ax: matplotlib axes to draw on, instead of a new figure.

        Raises:
            DependencyError: matplotlib is not installed.
            InputError: the path ends otherwise.
            PlanError: the plan has no graph, or is plain where the graph is not the plain model's.
        """
        from .pictures import Timeline, plot_timeline

        return plot_timeline(Timeline.of(self._known_graph, self.decisions), self.budget_bytes, path, ax)

    def draw(self, path: str | os.PathLike[str] | None = None, *, ax: Axes | None = None) -> Figure:
        """The graph from top to bottom: operations in order, segments as bands, checkpoints marked.

        Arguments and errors are those of :meth:`plot`, but any plan that has a graph can be drawn.
        """
        from .pictures import draw_graph

        return draw_graph(self._known_graph, self.decisions, path, ax)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, for :func:`ogc.load_plan` or ``ogc.optimize(..., plan=path)``.

        Raises:
            OSError: the file cannot be written.
            PlanError: the plan has no graph.
        """
        self.as_saved().write(path)

    def as_saved(self) -> SavedPlan:
        """What :meth:`save` writes."""
        graph = self._known_graph
        costs = ("peak_bytes", "plain_peak_bytes", "overhead", "flops_overhead", "step_seconds", "added_seconds")
        return SavedPlan(
            (saved_decisions(graph, self.decisions),),
            solver=self.solver,
            budget_bytes=self.budget_bytes,
            max_overhead=self.max_overhead,
            chunks=graph.chunks,
            regions=graph.chunked,
            unchunked=None if graph.unchunked is None else Fingerprint.of(graph.unchunked),
            about={"device": graph.device, "profile": graph.profile, **{name: getattr(self, name) for name in costs}},
        )

    @property
    def _known_graph(self) -> Graph:
        if self.graph is None:
            raise PlanError(
                "the plan does not know its graph, so nothing can be told of it; make it with ogc.make_plan"
            )
        return self.graph

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "graph": self.graph and self.graph.without_program()}
        state.pop("gap", None)
        return state

    def __str__(self) -> str:
        parts = (self.recomputed_seconds, self.runtime_seconds)
        shares = (seconds / self.step_seconds if self.step_seconds else 0.0 for seconds in parts)
        tables = [(SEGMENT_COLUMNS, [])] if self.graph is None else tables_of(self.graph, self.decisions)
        texts = [self.summary, *(table(header, rows) for header, rows in tables)]
        if self.graph is not None and self.offloaded:
            share = self.waiting_seconds / self.step_seconds if self.step_seconds else 0.0
            texts.append(f"operations wait for copies {share:+.1%} time")
        texts.append(
            "recomputation {:+.1%}, runtime {:+.1%} time".format(*shares)
            + f"; no plan of any kind below {self.lower_bound / MIB:.1f} MiB; {_count(self.segments)} segments"
        )
        if "gap" in vars(self):
            texts.append(str(self.gap))
        return "\n".join(texts)


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A header and its rows."""

SEGMENT_COLUMNS = ("segment", "operations", "modules", "mode", "saved MiB", "recomputed")


def tables_of(graph: Graph, decisions: Decisions) -> list[Table]:
    """What a plan is printed as: its segments, equal ones folded; low-memory operators and offloaded values, if any."""
    schedule = Schedule(graph, decisions)
    blocks = [*_blocks(schedule, decisions.segments)]
    rows = [row for stretch, times in fold(blocks, _look) for row in _rows(stretch, times)]
    tables: list[Table] = [(SEGMENT_COLUMNS, rows)]
    if decisions.low_memory:
        header = ["low-memory", "operator", "module", "PyTorch's own MiB", "of a peak of", "ms more"]
        tables.append((header, [*_low_memory_rows(graph, decisions)]))
    if decisions.offloaded:
        header = ["offloaded", "made by", "module", "MiB", "gone before", "back before", "needed by"]
        tables.append((header, [*_offloaded_rows(schedule)]))
    return tables


@dataclass(frozen=True)
class _Row:
    """A segment as it is printed: its place among those around it, its operations, their modules and what they take."""

    place: str
    start: int
    stop: int
    modules: str
    numbers: tuple[str, ...]


def _blocks(schedule: Schedule, segments: Sequence[Segment], number: int = 0, prefix: str = "") -> Iterator[list[_Row]]:
    """The rows of each segment, its parts below it."""
    graph = schedule.graph
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
        rows = [_Row(name, segment.start, segment.stop, span, (mode, f"{size / MIB:.2f}", share))]
        if len(segment.parts) > 1:
            rows += chain.from_iterable(_blocks(schedule, segment.parts, child, f"{name}."))
        yield rows


def _count(segments: Iterable[Segment]) -> int:
    """Those that are printed: parts of their own count too."""
    return sum(1 + (_count(segment.parts) if len(segment.parts) > 1 else 0) for segment in segments)


def _look(block: list[_Row]) -> object:
    """Equal for segments of equal layers: up to the numbers in names, and the measured share of time."""
    return [(row.stop - row.start, re.sub(r"\d+", "", row.modules), row.numbers[:-1]) for row in block]


def _rows(stretch: Sequence[list[_Row]], times: int) -> Iterator[tuple[str, ...]]:
    """What is printed of segments that follow themselves so many times."""
    for row in chain.from_iterable(stretch):
        yield (row.place, f"{row.start}-{row.stop - 1}", row.modules, *row.numbers)
    if times > 1:
        length = stretch[-1][0].stop - stretch[0][0].start
        first = stretch[0][0].start + length
        yield (
            "…",
            f"{first}-{first + (times - 1) * length - 1}",
            f"{times - 1} × the {len(stretch)} above",
            "",
            "",
            "",
        )


def fold(rows: Sequence[T], key: Callable[[T], object], most: int = 64) -> Iterator[tuple[Sequence[T], int]]:
    """Rows as stretches, and how often each follows itself: equal layers of a model are one stretch.

    Args:
        rows: in order.
        key: equal for rows that say the same.
        most: rows of a stretch.
    """
    keys, start = [key(row) for row in rows], 0
    while start < len(rows):
        length, times = 1, 1
        for size in range(1, min(most, (len(rows) - start) // 2) + 1):
            again = 1
            while keys[start : start + size] == keys[start + again * size : start + (again + 1) * size]:
                again += 1
            if again > 1 and again * size > length * times:
                length, times = size, again
        yield rows[start : start + length], times
        start += length * times


def _low_memory_rows(graph: Graph, decisions: Decisions) -> Iterator[tuple[str, ...]]:
    """A row per low-memory operator: the most bytes alive where PyTorch's own would run in its place."""
    limit = simulate(graph, decisions).peak_bytes
    keeping = tuple(t for t in decisions.low_memory if graph.operations[t].variant_saves_otherwise)
    alone: dict[int, int] = {}  # those that only take other bytes while they run
    for event in simulate(graph, replace(decisions, low_memory=keeping)).timeline:
        alone[event.operation] = max(event.bytes, alone.get(event.operation, 0))
    for t in keeping:
        without = replace(decisions, low_memory=tuple(n for n in decisions.low_memory if n != t))
        alone[t] = simulate(graph, without).peak_bytes
    for t in decisions.low_memory:
        op = graph.operations[t]
        numbers = (alone[t] / MIB, limit / MIB, op.variant_seconds * 1e3)
        yield (str(t), op.target, op.module, *(f"{number:.2f}" for number in numbers))


def _offloaded_rows(schedule: Schedule) -> Iterator[tuple[str, ...]]:
    """A row per offloaded value: the operations before which it is gone and, in the backward, back."""
    graph, steps = schedule.graph, schedule.steps
    for v, gone, back in schedule.offloaded:
        op, trip = graph.operations[graph.producers[v]], schedule.trips.get(v)
        step = None if trip is None else steps[trip.needed]
        need = "nothing" if step is None else str(step.operation if step.during is None else step.during)
        yield (
            graph.values[v].name,
            op.target,
            op.module,
            f"{graph.values[v].bytes / MIB:.2f}",
            str(gone),
            str(back),
            need,
        )


def plain_plan(graph: Graph) -> Plan:
    """The plan that runs the model as it is, once it has looked whether a call needs no other."""
    peak = plain_peak(graph)
    return Plan(
        decisions=Decisions((saved(0, len(graph)),) if len(graph) else (), is_plain=True),
        peak_bytes=peak,
        plain_peak_bytes=peak,
        lower_bound=lower_bound(graph),
        step_seconds=graph.step_seconds,
        step_flops=graph.step_flops,
        recomputed_seconds=0.0,
        recomputed_flops=0,
        runtime_seconds=graph.runtime.choice,
        solver="none",
        graph=graph,
    )


def make_plan(
    graph: Graph,
    decisions: Decisions | Iterable[Segment],
    solver: str = "by hand",
    *,
    recomputed_values: Iterable[int] = (),
    low_memory: Iterable[int] = (),
    offloaded: Iterable[Offload] = (),
) -> Plan:
    """The plan of given decisions, weighed by the simulator.

    Args:
        graph: the weighted graph.
        decisions: or segments alone, which cover the operations in order; see :func:`ogc.saved` and
            :func:`ogc.recomputed`.
        solver: the name of what chose them.
        recomputed_values: values that are not saved where they cross a cut either.
        low_memory: operations to run as their low-memory variant, as far as they have one, besides those of
            ``decisions``; see :attr:`ogc.Graph.low_memory`.
        offloaded: values to offload to the graph's :attr:`ogc.Graph.host`, besides those of ``decisions``.

    Raises:
        PlanError: the segments are not cut where the graph may be cut, an operation would run twice
            that must not, or a value cannot be offloaded.
    """
    decided = Decisions.of(decisions).recomputing(recomputed_values)
    decided = replace(decided, low_memory=tuple(sorted({*decided.low_memory, *low_memory})), is_plain=False)
    decided = replace(decided, offloaded=tuple(sorted({*decided.offloaded, *offloaded})))
    return plain_plan(graph).deciding(decided, solver)


def load_plan(path: str | os.PathLike[str], graph: Graph) -> Plan:
    """The plan that ``plan.save(path)`` wrote, for a graph that is the same but for what its operations weigh.

    Args:
        path: of the file.
        graph: from :func:`ogc.parse`, with the same arguments as when the plan was made; the simulator weighs the
            plan on it. One of :func:`ogc.chunk_batch`, or one part's of several, is planned through
            ``ogc.optimize(model, sample_input, plan=path)``.

    Returns:
        The plan; hand it to :func:`ogc.apply`.

    Raises:
        InputError: this is no graph.
        OSError: the file cannot be read.
        PlanError: the file is no plan, of an unknown version, or for another graph; the message says in what that
            differs.
    """
    return plan_on(graph, SavedPlan.from_file(path), os.fspath(path))


def plan_from_text(text: str, graph: Graph) -> Plan:
    """The plan of a graph that a text of :func:`text_of` stands for.

    Raises:
        InputError, PlanError: as :func:`load_plan` does.
    """
    return plan_on(graph, SavedPlan.from_text(text))


def text_of(plan: Any) -> str:
    """A plan of any kind as a JSON text, such as ``plan.save`` writes to a file.

    Raises:
        PlanError: the plan does not know its graph.
    """
    text: str = plan.as_saved().text
    return text


def plan_on(graph: Graph, saved: SavedPlan, source: str = "the plan") -> Plan:
    """The plan that was saved for a graph, weighed on it.

    Raises:
        InputError: this is no graph.
        PlanError: it was saved for another graph, or for parts of a model.
    """
    if not isinstance(graph, Graph):
        raise InputError(
            f"graph must be a Graph, as ogc.parse(model, sample_input) returns, not {type(graph).__name__}"
        )
    if saved.kind != WHOLE:
        raise PlanError(
            f"{source} has the plans of a model's parts, not one plan of a graph; hand it to "
            "ogc.optimize(model, sample_input, plan=...)"
        )
    (only,) = saved.plans
    if saved.regions and (saved.chunks, saved.regions) != (graph.chunks, graph.chunked):
        raise PlanError(
            f"{source} is for {len(saved.regions)} regions in {saved.chunks} chunks of the batch, which this graph "
            f"does not run so; use ogc.optimize(model, sample_input, chunks={saved.chunks}, plan=...)"
        )
    plan = restored(graph, only, saved, source)
    return replace(plan, budget_bytes=saved.budget_bytes, max_overhead=saved.max_overhead)


def restored(graph: Graph, one: SavedDecisions, saved: SavedPlan, source: str = "the plan") -> Plan:
    """One of the plans that were saved, for its graph.

    Raises:
        PlanError: it was saved for another graph; or its decisions cannot be carried out.
    """
    if difference := one.fingerprint.difference(Fingerprint.of(graph)):
        of_part = f" for part {one.name}" if one.name else ""
        is_other = saved.torch != torch_version()
        made = f"; it was saved with torch {saved.torch}, and this is {torch_version()}" if is_other else ""
        raise PlanError(f"{source} does not fit the graph{of_part}, which has {difference}{made}")
    return plain_plan(graph) if one.decisions.is_plain else make_plan(graph, one.decisions, saved.solver)


@dataclass(frozen=True)
class Frontier:
    """The curve of memory against overhead: each plan is faster and larger than the one before."""

    plans: tuple[Plan, ...]

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        peers: Mapping[str, tuple[int, float]] | None = None,
        ax: Axes | None = None,
    ) -> Figure:
        """Memory against overhead, with the plain model and the lower bound, and other methods as named points.

        Args:
            path: where to save the picture, ending in .png, .svg or .pdf.
            peers: by name, the peak in bytes and the overhead as a share of the plain step.
            ax: matplotlib axes to draw on, instead of a new figure.

        Raises:
            DependencyError: matplotlib is not installed.
            InputError: the path ends otherwise, or a peer is no pair of numbers.
        """
        from .pictures import plot_frontier

        points, plain = [(plan.peak_bytes, plan.overhead) for plan in self.plans], self.plans[-1]
        return plot_frontier(points, plain.plain_peak_bytes, plain.lower_bound, peers or {}, path, ax)

    def __str__(self) -> str:
        rows = [
            [
                f"{plan.peak_bytes / MIB:.1f}",
                f"{plan.peak_bytes / plan.plain_peak_bytes:.1%}" if plan.plain_peak_bytes else "-",
                f"{plan.overhead:.1%}",
                str(max((segment.depth for segment in plan.segments), default=0)),
            ]
            for plan in self.plans
        ]
        return table(["peak MiB", "of plain", "overhead", "levels"], rows)

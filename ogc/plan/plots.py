"""Pictures of plans and of frontiers, for readers of papers and of pull requests. They need matplotlib.

What is shown is made first, as numbers (:class:`Timeline`, :func:`checkpoints`), and then drawn. Colours are
those of Okabe and Ito, which people with any colour vision tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ..errors import DependencyError, InputError, PlanError
from ..graph import Graph, Operation
from .plan import Plan, Segment
from .schedule import FORWARD, Schedule
from .simulate import Event, plain_timeline, trace

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle
except ImportError as error:
    raise DependencyError("pictures need matplotlib, which is not installed: pip install matplotlib") from error

if TYPE_CHECKING:
    from ..solver.solve import Frontier

MIB = 2**20
FORMATS = (".png", ".svg", ".pdf")
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, PALE = "#767676", "#E4E4E4"

LAYERS = {
    "checkpoints": ("checkpoints", BLUE),
    "saved": ("other values of the forward", SKY),
    "recomputed": ("computed again", ORANGE),
    "gradients": ("gradients", GREEN),
    "working": ("the running operation itself", PURPLE),
}
"""The kinds of bytes of :class:`ogc.plan.Moment`, from the bottom of the picture, with label and colour."""

Location = str | PathLike[str] | None


class Picture(Figure):
    """A figure that notebooks show without further ado."""

    def _repr_png_(self) -> bytes:
        from io import BytesIO

        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


# -- memory over a step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """The numbers behind :func:`plot_plan`.

    Attributes:
        edges: where each event begins and the last ends, in operations run.
        layers: bytes at each event, by the names in ``LAYERS``.
        backward: where the backward begins.
        plain: the same for the plain model, edges and bytes; None where it is not known.
    """

    edges: NDArray[np.float64]
    layers: dict[str, NDArray[np.int64]]
    backward: float
    plain: tuple[NDArray[np.float64], NDArray[np.int64]] | None

    @property
    def total(self) -> NDArray[np.int64]:
        """All bytes alive at each event."""
        return np.sum(list(self.layers.values()), axis=0, dtype=np.int64)

    @classmethod
    def of(cls, plan: Plan) -> Timeline:
        """The timeline of a plan, by the simulator."""
        graph = _graph_of(plan)
        moments = trace(graph, plan)
        events = plain_timeline(graph)
        return cls(
            edges=_edges([moment.event for moment in moments]),
            layers={name: np.array([getattr(moment, name) for moment in moments], np.int64) for name in LAYERS},
            backward=float(len(graph)),
            plain=None if events is None else (_edges(events), np.array([event.bytes for event in events], np.int64)),
        )


def _edges(events: Sequence[Event]) -> NDArray[np.float64]:
    """An operation run is 1 wide; those of its events that follow one another share that."""
    sizes: list[int] = []
    for number, event in enumerate(events):
        last = events[number - 1] if number else None
        if last is not None and (last.phase, last.run, last.operation) == (event.phase, event.run, event.operation):
            sizes[-1] += 1
        else:
            sizes.append(1)
    widths = np.concatenate([np.full(size, 1 / size) for size in sizes]) if sizes else np.zeros(0)
    return np.concatenate([[0.0], np.cumsum(widths)])


def plot_plan(plan: Plan, path: Location = None, ax: Axes | None = None) -> Figure:
    """See :meth:`ogc.Plan.plot`."""
    _check_ending(path)
    timeline = Timeline.of(plan)
    figure, ax, is_ours = _axes(ax, (8.0, 4.4))
    handles: list[Any] = []
    top = max(plan.plain_peak_bytes, plan.peak_bytes, plan.budget_bytes or 0) / MIB or 1.0
    if not plan.is_plain:
        handles.append(_outline(ax, timeline, plan.plain_peak_bytes))
    base = np.zeros(len(timeline.edges))
    for name, (label, colour) in LAYERS.items():
        if timeline.layers[name].any():
            upper = base + _steps(timeline.layers[name])
            ax.fill_between(timeline.edges, base, upper, step="post", color=colour, linewidth=0)
            handles.insert(0, Patch(color=colour, label=label))
            base = upper
    if plan.budget_bytes is not None:
        label = f"budget, {_mib(plan.budget_bytes)}"
        handles.append(ax.axhline(plan.budget_bytes / MIB, color=RED, linestyle="--", linewidth=1.5, label=label))
    _mark_peak(ax, timeline, plan)
    _mark_phases(ax, timeline, top)
    ax.set_xlim(0, max(timeline.edges[-1], timeline.plain[0][-1] if timeline.plain is not None else 0, 1))
    ax.set_ylim(0, 1.15 * top)
    ax.set_xlabel("operations run, in order")
    ax.set_ylabel("activation memory, MiB")
    _finish(ax)
    _legend(figure, ax, handles, is_ours)
    return _saved(figure, path)


def _outline(ax: Axes, timeline: Timeline, plain_peak: int) -> Any:
    label = f"plain model, peak {_mib(plain_peak)}"
    if timeline.plain is None:
        return ax.axhline(plain_peak / MIB, color=GREY, linewidth=1, label=label)
    edges, sizes = timeline.plain
    ax.fill_between(edges, 0, _steps(sizes), step="post", color=PALE, linewidth=0)
    ax.step(edges, _steps(sizes), where="post", color=GREY, linewidth=1)
    return Patch(facecolor=PALE, edgecolor=GREY, label=label)


def _steps(sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Heights in MiB at the edges of steps: the last event's until its end."""
    return np.append(sizes, sizes[-1:]) / MIB if len(sizes) else np.zeros(1)


def _mark_peak(ax: Axes, timeline: Timeline, plan: Plan) -> None:
    if not len(timeline.total):
        return
    first = int(timeline.total.argmax())
    x, y = (timeline.edges[first] + timeline.edges[first + 1]) / 2, plan.peak_bytes / MIB
    right = x > timeline.edges[-1] * 0.75
    ax.plot([x], [y], marker="v", color=BLACK, markersize=6, clip_on=False)
    ax.annotate(
        f"peak {_mib(plan.peak_bytes)}", (x, y), xytext=(-6 if right else 6, 6), textcoords="offset points",
        ha="right" if right else "left", va="bottom", fontweight="bold",
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
    )  # fmt: skip


def _mark_phases(ax: Axes, timeline: Timeline, top: float) -> None:
    ax.axvline(timeline.backward, color=GREY, linestyle=":", linewidth=1)
    for text, side, ha in (("forward ", timeline.backward, "right"), (" backward", timeline.backward, "left")):
        ax.text(side, 1.14 * top, text, ha=ha, va="top", color=GREY)


# -- memory against overhead ---------------------------------------------------------------------------------

_MARKERS = "sD^vP*Xp<>h"


def plot_frontier(
    frontier: Frontier, path: Location = None, peers: Mapping[str, tuple[int, float]] | None = None,
    ax: Axes | None = None,
) -> Figure:  # fmt: skip
    """See :meth:`ogc.Frontier.plot`."""
    _check_ending(path)
    points = {name: _peer(name, point) for name, point in (peers or {}).items()}
    figure, ax, is_ours = _axes(ax, (8.0, 4.4))
    plans, plain = frontier.plans, frontier.plans[-1]
    x = [plan.peak_bytes / MIB for plan in plans]
    y = [plan.overhead * 100 for plan in plans]
    handles = ax.plot(x, y, drawstyle="steps-post", color=BLUE, linewidth=1.5, marker="o", markersize=4, label="ogc")
    handles += ax.plot(
        [x[-1]], [y[-1]], "o", color=BLACK, markersize=9, clip_on=False, zorder=4,
        label=f"plain model, {_mib(plain.plain_peak_bytes)}",
    )  # fmt: skip
    bound = plain.lower_bound
    label = f"lower bound of any plan, {_mib(bound)}"
    handles.append(ax.axvline(bound / MIB, color=GREY, linestyle="--", linewidth=1.5, label=label))
    colours = (ORANGE, GREEN, PURPLE, RED, SKY, GREY)
    for number, (name, (size, overhead)) in enumerate(points.items()):
        style: dict[str, Any] = {"marker": _MARKERS[number % len(_MARKERS)], "color": colours[number % len(colours)]}
        handles += ax.plot(
            [size / MIB], [overhead * 100], linestyle="", markersize=9, markeredgecolor=BLACK, clip_on=False,
            zorder=5, label=f"{name}, {_mib(size)} at {overhead:.0%}", **style,
        )  # fmt: skip
    ax.set_xlim(0, 1.05 * max([*x, *(size / MIB for size, _ in points.values()), 1e-9]))
    top = max([*y, *(overhead * 100 for _, overhead in points.values()), 1.0])
    ax.set_ylim(-0.03 * top, 1.1 * top)
    ax.set_xlabel("peak activation memory, MiB")
    ax.set_ylabel("recomputed time, % of a plain step")
    _finish(ax)
    _legend(figure, ax, handles, is_ours)
    return _saved(figure, path)


def _peer(name: str, point: Any) -> tuple[float, float]:
    try:
        size, overhead = map(float, point)
    except (TypeError, ValueError):
        size = overhead = float("nan")
    if not (0 <= size < float("inf") and 0 <= overhead < float("inf")):
        raise InputError(f"peer {name!r} must be (bytes, overhead as a share of the plain step), not {point!r}")
    return size, overhead


# -- the graph in its segments -------------------------------------------------------------------------------

LABELLED = 240
"""Graphs of more operations are drawn smaller, with the names of segments but not of operations."""

_ROW, _SMALL_HEIGHT, _TEXT = 0.17, 16.0, 0.13  # inches
_LEFT, _RIGHT = -4.6, 4.0


def checkpoints(plan: Plan) -> frozenset[int]:
    """The values of the forward that some segment is run again from."""
    schedule = Schedule(_graph_of(plan), plan.segments, plan.remade)
    found = ((run.parent, v) for run in schedule.runs[1:] for v in run.needs)
    return frozenset(v for parent, v in found if parent is not None and schedule.source(parent, v) == FORWARD)


def draw_plan(plan: Plan, path: Location = None, ax: Axes | None = None) -> Figure:
    """See :meth:`ogc.Plan.draw`."""
    _check_ending(path)
    graph = _graph_of(plan)
    is_labelled = len(graph) <= LABELLED
    row = _ROW if is_labelled else _SMALL_HEIGHT / len(graph)
    figure, ax, is_ours = _axes(ax, (8.0, len(graph) * row + 1.4))
    if not plan.is_plain:
        _bands(ax, plan.segments, named=_TEXT / row)
    kept = checkpoints(plan)
    _edges_and_nodes(ax, graph, kept, small=not is_labelled)
    if is_labelled:
        for t, op in enumerate(graph.operations):
            ax.text(-1.5, t, _shortened(op.module, 28), ha="right", va="center", fontsize=7.5, color="#404040")
            ax.text(-0.25, t, _shortened(_operator(op), 20), ha="right", va="center", fontsize=7.5)
            sizes = [graph.values[v].bytes for v in op.writes if v in kept and graph.last_writes[v] == t]
            if sizes:
                ax.text(_RIGHT - 0.9, t, _mib(sum(sizes)), ha="right", va="center", fontsize=7.5, fontweight="bold")
    ax.set_xlim(_LEFT, _RIGHT)
    ax.set_ylim(max(len(graph), 1) - 0.4, -0.6)
    ax.set_axis_off()
    handles = [
        Patch(color=_BANDS["saved"], label="segment saved"),
        Patch(color=_BANDS["recomputed"], label="segment run again"),
        Patch(color=_BANDS["nested"], label="run again in parts"),
        Line2D([], [], marker="o", linestyle="", color=BLUE, markersize=7, label="makes a checkpoint (MiB)"),
        Line2D([], [], marker="o", linestyle="", color="white", markeredgecolor=GREY, label="other operation"),
    ]
    _legend(figure, ax, handles, is_ours)
    return _saved(figure, path)


_BANDS = {"saved": "#D9EAF5", "recomputed": "#F9E3B4", "nested": "#EFC06A"}


def _bands(ax: Axes, segments: Sequence[Segment], *, named: float, depth: int = 0, prefix: str = "") -> None:
    """A band per segment; the parts of one that is run again in parts lie within it, as narrower ones.

    Segments of at least ``named`` operations have room for their name.
    """
    for number, segment in enumerate(segments):
        is_nested = len(segment.parts) > 1
        kind = "nested" if is_nested else "recomputed" if segment.parts else "saved"
        left, right = _LEFT + 0.25 * depth, _RIGHT - 0.25 * depth
        corner = left, segment.start - 0.46
        size = right - left, segment.stop - segment.start - 0.08
        ax.add_patch(Rectangle(corner, *size, facecolor=_BANDS[kind], edgecolor="white", zorder=0.1 + 0.01 * depth))
        name = f"{prefix}{number}"
        if is_nested:
            _bands(ax, segment.parts, named=named, depth=depth + 1, prefix=f"{name}.")
        elif segment.stop - segment.start >= named:
            middle = segment.start + max(0.0, named / 2 - 0.5)
            ax.text(right - 0.08, middle, name, ha="right", va="center", fontsize=7.5, color="#555555")


def _edges_and_nodes(ax: Axes, graph: Graph, kept: frozenset[int], *, small: bool) -> None:
    dag = nx.DiGraph(graph.to_networkx())
    place = {op.name: t for t, op in enumerate(graph.operations)}
    where = {name: (0.0, float(t)) for name, t in place.items()}
    marked = {op.name for t, op in enumerate(graph.operations) for v in op.writes if v in kept}
    nodes = nx.draw_networkx_nodes(
        dag, where, list(dag.nodes), ax=ax, node_size=8 if small else 30, linewidths=0.3 if small else 0.8,
        node_color=[BLUE if name in marked else "white" for name in dag.nodes],
        edgecolors=[BLUE if name in marked else GREY for name in dag.nodes],
    )  # fmt: skip
    nodes.set_zorder(3)
    for a, b in dag.edges:
        _edge(ax, place[a], place[b])


def _operator(op: Operation) -> str:
    """The operator without its library and overload: ``relu_`` for ``aten.relu_.default``."""
    parts = op.target.split(".")
    return parts[1] if len(parts) == 3 else op.target or op.name


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[1 - most :]


def _edge(ax: Axes, start: int, stop: int) -> None:
    """A line to the next operation, an arc on the right to a later one."""
    length = stop - start
    if length <= 1:
        ax.plot([0, 0], [start, stop], color=GREY, linewidth=1, zorder=1)
        return
    angle = np.linspace(0, np.pi, 40)
    width = min(2.4, 0.3 + 0.12 * length)
    ax.plot(width * np.sin(angle) ** 0.5, (start + stop) / 2 - np.cos(angle) * length / 2, color=GREY, lw=0.8, zorder=1)


# -- all of them ---------------------------------------------------------------------------------------------


def _graph_of(plan: Plan) -> Graph:
    if plan.graph is None:
        raise PlanError("the plan does not know its graph, so there is nothing to draw; make it with ogc.make_plan")
    return plan.graph


def _check_ending(path: Location) -> None:
    if path is not None and Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"a picture's file must end in {', '.join(FORMATS)}, not {str(path)!r}")


def _axes(ax: Axes | None, size: tuple[float, float]) -> tuple[Figure, Axes, bool]:
    """The figure, its axes, and whether both are new."""
    if ax is not None:
        figure = ax.get_figure(root=True)
        assert figure is not None
        return figure, ax, False
    figure = Picture(figsize=size, dpi=100, layout="constrained")
    return figure, figure.add_subplot(), True


def _legend(figure: Figure, ax: Axes, handles: list[Any], is_ours: bool) -> None:
    style: dict[str, Any] = {"handles": handles, "frameon": False, "ncols": 3, "fontsize": 9}
    if is_ours:
        figure.legend(loc="outside upper left", **style)
    else:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), **style)


def _finish(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=PALE, linewidth=0.6)
    ax.set_axisbelow(True)


def _mib(size: float) -> str:
    size /= MIB
    return f"{size:.0f} MiB" if size >= 10 else f"{size:.3g} MiB"


def _saved(figure: Figure, path: Location) -> Figure:
    if path is not None:
        ending = Path(path).suffix.lower()
        # The same picture is the same file.
        with matplotlib.rc_context({"svg.hashsalt": "ogc"}):
            figure.savefig(path, metadata={"Date": None} if ending == ".svg" else None)
    return figure

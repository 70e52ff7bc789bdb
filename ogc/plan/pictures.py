"""Pictures: memory over a step, the graph with the segments of a plan, memory against overhead. They need matplotlib.

Raises:
    DependencyError: matplotlib is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ..errors import DependencyError, InputError
from ..graph import MIB, Graph, Operation
from .decisions import Decisions, Segment
from .schedule import Schedule
from .timeline import BLACK, BLUE, GREEN, GREY, LAYERS, ORANGE, PALE, PURPLE, RED, SKY, YELLOW, Timeline

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle
except ImportError as error:
    raise DependencyError("pictures need matplotlib, which is not installed: pip install matplotlib") from error

FORMATS = (".png", ".svg", ".pdf")
Location = str | PathLike[str] | None


class Picture(Figure):
    """A figure that notebooks show without further ado."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def check_ending(path: Location) -> None:
    if path is not None and Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"a picture's file must end in {', '.join(FORMATS)}, not {str(path)!r}")


def axes_of(ax: Axes | None, size: tuple[float, float]) -> tuple[Figure, Axes, bool]:
    """The figure, its axes, and whether both are new."""
    if ax is not None:
        figure = ax.get_figure(root=True)
        assert figure is not None
        return figure, ax, False
    figure = Picture(figsize=size, dpi=100, layout="constrained")
    return figure, figure.add_subplot(), True


def finish(figure: Figure, ax: Axes, handles: list[Any], is_ours: bool, path: Location) -> Figure:
    """The figure with its legend, saved if there is a path; the same picture is the same file."""
    style: dict[str, Any] = {"handles": handles, "frameon": False, "ncols": 3, "fontsize": 9}
    if is_ours:
        figure.legend(loc="outside upper left", **style)
    else:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), **style)
    if path is not None:
        with matplotlib.rc_context({"svg.hashsalt": "ogc"}):
            figure.savefig(path, metadata={"Date": None} if Path(path).suffix.lower() == ".svg" else None)
    return figure


def draw_grid(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=PALE, linewidth=0.6)
    ax.set_axisbelow(True)


def mib(size: float) -> str:
    size /= MIB
    return f"{size:.0f} MiB" if size >= 10 else f"{size:.3g} MiB"


# -- memory over a step ------------------------------------------------------------------------------------------


def plot_timeline(
    timeline: Timeline, budget: int | None = None, path: Location = None, ax: Axes | None = None
) -> Figure:
    """The picture of :meth:`ogc.Plan.plot`, with the ``budget`` in bytes that was asked for, if one was."""
    check_ending(path)
    figure, ax, is_ours = axes_of(ax, (8.0, 4.4))
    handles: list[Any] = []
    top = max(timeline.plain_peak, *timeline.total.tolist(), budget or 0) / MIB or 1.0
    if not timeline.is_plain:
        handles.append(_outline(ax, timeline))
    base = np.zeros(len(timeline.edges))
    for name, (label, colour) in LAYERS.items():
        if timeline.layers[name].any():
            upper = base + _steps(timeline.layers[name])
            ax.fill_between(timeline.edges, base, upper, step="post", color=colour, linewidth=0)
            handles.insert(0, Patch(color=colour, label=label))
            base = upper
    if budget is not None:
        label = f"budget, {mib(budget)}"
        handles.append(ax.axhline(budget / MIB, color=RED, linestyle="--", linewidth=1.5, label=label))
    handles += _draw_copies(ax, timeline, top)
    _mark_peak(ax, timeline)
    _mark_phases(ax, timeline, top)
    ax.set_xlim(0, max(timeline.edges[-1], timeline.plain[0][-1] if timeline.plain is not None else 0, 1))
    ax.set_ylim(0, 1.15 * top)
    ax.set_xlabel("operations run, in order")
    ax.set_ylabel("activation memory, MiB")
    draw_grid(ax)
    return finish(figure, ax, handles, is_ours, path)


def _outline(ax: Axes, timeline: Timeline) -> Any:
    label = f"plain model, peak {mib(timeline.plain_peak)}"
    if timeline.plain is None:
        return ax.axhline(timeline.plain_peak / MIB, color=GREY, linewidth=1, label=label)
    edges, sizes = timeline.plain
    ax.fill_between(edges, 0, _steps(sizes), step="post", color=PALE, linewidth=0)
    ax.step(edges, _steps(sizes), where="post", color=GREY, linewidth=1)
    return Patch(facecolor=PALE, edgecolor=GREY, label=label)


def _draw_copies(ax: Axes, timeline: Timeline, top: float) -> list[Any]:
    """The two queues as rows at the foot of the picture, a bar for each copy."""
    handles = []
    for row, (is_out, label, colour) in enumerate(((True, "copies out", YELLOW), (False, "copies back", RED))):
        bars = [(start, stop - start) for one, start, stop in timeline.copies if one.is_out == is_out]
        if bars:
            height = 0.02 * top
            ax.broken_barh(
                bars, (1.5 * row * height, height), facecolor=colour, edgecolor=BLACK, linewidth=0.3, zorder=3
            )
            handles.append(Patch(color=colour, label=label))
    return handles


def _steps(sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Heights in MiB at the edges of steps: the last event's until its end."""
    return np.append(sizes, sizes[-1:]) / MIB if len(sizes) else np.zeros(1)


def _mark_peak(ax: Axes, timeline: Timeline) -> None:
    if not len(timeline.total):
        return
    first, peak = int(timeline.total.argmax()), int(timeline.total.max())
    x, y = (timeline.edges[first] + timeline.edges[first + 1]) / 2, peak / MIB
    right = x > timeline.edges[-1] * 0.75
    ax.plot([x], [y], marker="v", color=BLACK, markersize=6, clip_on=False)
    ax.annotate(
        f"peak {mib(peak)}", (x, y), xytext=(-6 if right else 6, 6), textcoords="offset points",
        ha="right" if right else "left", va="bottom", fontweight="bold",
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
    )  # fmt: skip


def _mark_phases(ax: Axes, timeline: Timeline, top: float) -> None:
    ax.axvline(timeline.backward, color=GREY, linestyle=":", linewidth=1)
    for text, ha in (("forward ", "right"), (" backward", "left")):
        ax.text(timeline.backward, 1.14 * top, text, ha=ha, va="top", color=GREY)


# -- the graph ---------------------------------------------------------------------------------------------------

LABELLED = 240
"""Graphs of more operations are drawn smaller, with the names of segments but not of operations."""

_ROW, _SMALL_HEIGHT, _TEXT = 0.17, 16.0, 0.13  # inches
_LEFT, _RIGHT = -4.6, 4.0


def draw_graph(graph: Graph, decisions: Decisions, path: Location = None, ax: Axes | None = None) -> Figure:
    """The picture of :meth:`ogc.Plan.draw`."""
    check_ending(path)
    is_labelled = len(graph) <= LABELLED
    row = _ROW if is_labelled else _SMALL_HEIGHT / len(graph)
    figure, ax, is_ours = axes_of(ax, (8.0, len(graph) * row + 1.4))
    if not decisions.is_plain:
        _bands(ax, decisions.segments, named=_TEXT / row)
    kept = Schedule(graph, decisions).checkpoints
    _edges_and_nodes(ax, graph, kept, small=not is_labelled)
    if is_labelled:
        for t, op in enumerate(graph.operations):
            ax.text(-1.5, t, _shortened(op.module, 28), ha="right", va="center", fontsize=7.5, color="#404040")
            ax.text(-0.25, t, _shortened(_operator(op), 20), ha="right", va="center", fontsize=7.5)
            sizes = [graph.values[v].bytes for v in op.writes if v in kept and graph.last_writes[v] == t]
            if sizes:
                size = mib(sum(sizes))
                ax.text(_RIGHT - 0.9, t, size, ha="right", va="center", fontsize=7.5, fontweight="bold")
    ax.set_xlim(_LEFT, _RIGHT)
    ax.set_ylim(max(len(graph), 1) - 0.4, -0.6)
    ax.set_axis_off()
    handles = [
        Patch(color=_BANDS["saved"], label="segment saved"),
        Patch(color=_BANDS["recomputed"], label="recomputed segment"),
        Patch(color=_BANDS["nested"], label="recomputed in parts"),
        Line2D([], [], marker="o", linestyle="", color=BLUE, markersize=7, label="makes a checkpoint (MiB)"),
        Line2D([], [], marker="o", linestyle="", color="white", markeredgecolor=GREY, label="other operation"),
    ]
    return finish(figure, ax, handles, is_ours, path)


_BANDS = {"saved": "#D9EAF5", "recomputed": "#F9E3B4", "nested": "#EFC06A"}


def _bands(ax: Axes, segments: Sequence[Segment], *, named: float, depth: int = 0, prefix: str = "") -> None:
    """A band per segment; the parts of one that is recomputed in parts lie within it, as narrower ones.

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


# -- memory against overhead ------------------------------------------------------------------------------------

_MARKERS = "sD^vP*Xp<>h"


def plot_frontier(
    points: Sequence[tuple[int, float]], plain_peak: int, bound: int, peers: Mapping[str, tuple[int, float]],
    path: Location = None, ax: Axes | None = None,
) -> Figure:  # fmt: skip
    """The picture of :meth:`ogc.Frontier.plot`.

    Args:
        points: peak in bytes and overhead of each plan, the plain model's last.
        plain_peak, bound: bytes that the plain model and any plan need.
        peers: points of other methods, by name.
        path: where to save it, if anywhere.
        ax: axes to draw on, instead of a new figure.
    """
    check_ending(path)
    others = {name: _peer(name, point) for name, point in peers.items()}
    figure, ax, is_ours = axes_of(ax, (8.0, 4.4))
    x = [size / MIB for size, _ in points]
    y = [overhead * 100 for _, overhead in points]
    handles = ax.plot(x, y, drawstyle="steps-post", color=BLUE, linewidth=1.5, marker="o", markersize=4, label="ogc")
    handles += ax.plot(
        [x[-1]], [y[-1]], "o", color=BLACK, markersize=9, clip_on=False, zorder=4,
        label=f"plain model, {mib(plain_peak)}",
    )  # fmt: skip
    label = f"lower bound of any plan, {mib(bound)}"
    handles.append(ax.axvline(bound / MIB, color=GREY, linestyle="--", linewidth=1.5, label=label))
    colours = (ORANGE, GREEN, PURPLE, RED, SKY, GREY)
    for number, (name, (size, overhead)) in enumerate(others.items()):
        style: dict[str, Any] = {"marker": _MARKERS[number % len(_MARKERS)], "color": colours[number % len(colours)]}
        handles += ax.plot(
            [size / MIB], [overhead * 100], linestyle="", markersize=9, markeredgecolor=BLACK, clip_on=False,
            zorder=5, label=f"{name}, {mib(size)} at {overhead:.0%}", **style,
        )  # fmt: skip
    ax.set_xlim(0, 1.05 * max([*x, *(size / MIB for size, _ in others.values()), 1e-9]))
    top = max([*y, *(overhead * 100 for _, overhead in others.values()), 1.0])
    ax.set_ylim(-0.03 * top, 1.1 * top)
    ax.set_xlabel("peak activation memory, MiB")
    ax.set_ylabel("recomputed time, % of a plain step")
    draw_grid(ax)
    return finish(figure, ax, handles, is_ours, path)


def _peer(name: str, point: Any) -> tuple[float, float]:
    try:
        size, overhead = map(float, point)
    except (TypeError, ValueError):
        size = overhead = float("nan")
    if not (0 <= size < float("inf") and 0 <= overhead < float("inf")):
        raise InputError(f"peer {name!r} must be (bytes, overhead as a share of the plain step), not {point!r}")
    return size, overhead

"""The graph from top to bottom, with the segments of a plan as bands and its checkpoints marked."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
import numpy as np

from ...graph import Graph, Operation
from ..decisions import Decisions, Segment
from ..schedule import Schedule
from . import canvas
from .canvas import BLUE, GREY, Axes, Figure, Line2D, Location, Patch, Rectangle

LABELLED = 240
"""Graphs of more operations are drawn smaller, with the names of segments but not of operations."""

_ROW, _SMALL_HEIGHT, _TEXT = 0.17, 16.0, 0.13  # inches
_LEFT, _RIGHT = -4.6, 4.0


def draw_graph(graph: Graph, decisions: Decisions, path: Location = None, ax: Axes | None = None) -> Figure:
    """The picture of :meth:`ogc.Plan.draw`."""
    canvas.check_ending(path)
    is_labelled = len(graph) <= LABELLED
    row = _ROW if is_labelled else _SMALL_HEIGHT / len(graph)
    figure, ax, is_ours = canvas.axes_of(ax, (8.0, len(graph) * row + 1.4))
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
                size = canvas.mib(sum(sizes))
                ax.text(_RIGHT - 0.9, t, size, ha="right", va="center", fontsize=7.5, fontweight="bold")
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
    return canvas.finish(figure, ax, handles, is_ours, path)


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

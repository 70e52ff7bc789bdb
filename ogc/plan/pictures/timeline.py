"""Memory over a step, first as numbers, then as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...graph import Graph
from ..decisions import Decisions
from ..simulate import Event, plain_peak, plain_timeline
from ..trace import trace
from . import canvas
from .canvas import GREY, MIB, Axes, Figure, Location, Patch

LAYERS = {
    "checkpoints": ("checkpoints", canvas.BLUE),
    "saved": ("other values of the forward", canvas.SKY),
    "recomputed": ("computed again", canvas.ORANGE),
    "gradients": ("gradients", canvas.GREEN),
    "working": ("the running operation itself", canvas.PURPLE),
}
"""The kinds of bytes of :class:`ogc.plan.Moment`, from the bottom of the picture, with label and colour."""


@dataclass(frozen=True)
class Timeline:
    """The numbers behind :func:`plot_timeline`.

    Attributes:
        edges: where each event begins and the last ends, in operations run.
        layers: bytes at each event, by the names in ``LAYERS``.
        backward: where the backward begins.
        plain: edges and bytes of the plain model; None where they are not known.
        plain_peak: in bytes.
        is_plain: whether the plan is to run the plain model.
    """

    edges: NDArray[np.float64]
    layers: dict[str, NDArray[np.int64]]
    backward: float
    plain: tuple[NDArray[np.float64], NDArray[np.int64]] | None
    plain_peak: int
    is_plain: bool

    @property
    def total(self) -> NDArray[np.int64]:
        """All bytes alive at each event."""
        return np.sum(list(self.layers.values()), axis=0, dtype=np.int64)

    @classmethod
    def of(cls, graph: Graph, decisions: Decisions) -> Timeline:
        """The timeline of these decisions by the simulator."""
        moments = trace(graph, decisions)
        events = plain_timeline(graph)
        return cls(
            edges=_edges([moment.event for moment in moments]),
            layers={name: np.array([getattr(moment, name) for moment in moments], np.int64) for name in LAYERS},
            backward=float(len(graph)),
            plain=None if events is None else (_edges(events), np.array([event.bytes for event in events], np.int64)),
            plain_peak=plain_peak(graph),
            is_plain=decisions.is_plain,
        )


def _edges(events: Sequence[Event]) -> NDArray[np.float64]:
    """An operation run is 1 wide; those of its events that follow one another share that."""
    groups = (len([*group]) for _, group in groupby(events, lambda event: event[:3]))
    widths = [1 / size for size in groups for _ in range(size)]
    return np.concatenate([[0.0], np.cumsum(widths)])


def plot_timeline(
    timeline: Timeline, budget: int | None = None, path: Location = None, ax: Axes | None = None
) -> Figure:
    """The picture of :meth:`ogc.Plan.plot`, with the ``budget`` in bytes that was asked for, if one was."""
    canvas.check_ending(path)
    figure, ax, is_ours = canvas.axes_of(ax, (8.0, 4.4))
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
        label = f"budget, {canvas.mib(budget)}"
        handles.append(ax.axhline(budget / MIB, color=canvas.RED, linestyle="--", linewidth=1.5, label=label))
    _mark_peak(ax, timeline)
    _mark_phases(ax, timeline, top)
    ax.set_xlim(0, max(timeline.edges[-1], timeline.plain[0][-1] if timeline.plain is not None else 0, 1))
    ax.set_ylim(0, 1.15 * top)
    ax.set_xlabel("operations run, in order")
    ax.set_ylabel("activation memory, MiB")
    canvas.draw_grid(ax)
    return canvas.finish(figure, ax, handles, is_ours, path)


def _outline(ax: Axes, timeline: Timeline) -> Any:
    label = f"plain model, peak {canvas.mib(timeline.plain_peak)}"
    if timeline.plain is None:
        return ax.axhline(timeline.plain_peak / MIB, color=GREY, linewidth=1, label=label)
    edges, sizes = timeline.plain
    ax.fill_between(edges, 0, _steps(sizes), step="post", color=canvas.PALE, linewidth=0)
    ax.step(edges, _steps(sizes), where="post", color=GREY, linewidth=1)
    return Patch(facecolor=canvas.PALE, edgecolor=GREY, label=label)


def _steps(sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Heights in MiB at the edges of steps: the last event's until its end."""
    return np.append(sizes, sizes[-1:]) / MIB if len(sizes) else np.zeros(1)


def _mark_peak(ax: Axes, timeline: Timeline) -> None:
    if not len(timeline.total):
        return
    first, peak = int(timeline.total.argmax()), int(timeline.total.max())
    x, y = (timeline.edges[first] + timeline.edges[first + 1]) / 2, peak / MIB
    right = x > timeline.edges[-1] * 0.75
    ax.plot([x], [y], marker="v", color=canvas.BLACK, markersize=6, clip_on=False)
    ax.annotate(
        f"peak {canvas.mib(peak)}", (x, y), xytext=(-6 if right else 6, 6), textcoords="offset points",
        ha="right" if right else "left", va="bottom", fontweight="bold",
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.0},
    )  # fmt: skip


def _mark_phases(ax: Axes, timeline: Timeline, top: float) -> None:
    ax.axvline(timeline.backward, color=GREY, linestyle=":", linewidth=1)
    for text, ha in (("forward ", "right"), (" backward", "left")):
        ax.text(timeline.backward, 1.14 * top, text, ha=ha, va="top", color=GREY)

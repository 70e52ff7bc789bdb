"""Promised against paid: a point for each plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .row import NOTHING, OF_BLOCKS, OF_SELECTIVE, TimeRow

LABELLED = 5
"""Plans that are named: those whose promise is the furthest off."""


def draw(rows: Sequence[TimeRow], path: Path) -> None:
    """Draw the plans of these rows; SVG, PNG or PDF by the ending of the path.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    from ogc.plan.pictures import canvas

    figure, ax, is_ours = canvas.axes_of(None, (7.0, 5.5))
    planned = [row for row in rows if row.promised is not None and row.paid is not None]
    ends = [0.0, *(100 * share for row in planned for share in (row.promised, row.paid) if share is not None)]
    line = min(ends), max(ends)
    ax.plot(line, line, color=canvas.GREY, linewidth=0.8, zorder=1)
    colours = (canvas.BLACK, canvas.BLUE, canvas.SKY, canvas.GREEN, canvas.ORANGE, canvas.PURPLE)
    ways = list(dict.fromkeys(row.way for row in planned))
    known = [way for way in (NOTHING, OF_BLOCKS, OF_SELECTIVE) if way in ways]
    handles = []
    for colour, way in zip(colours, [*(way for way in ways if way not in known), *known], strict=False):
        xs = [100 * row.promised for row in planned if row.way == way and row.promised is not None]
        ys = [100 * row.paid for row in planned if row.way == way and row.paid is not None]
        ax.scatter(xs, ys, s=16, color=colour, zorder=2)
        handles.append(canvas.Line2D([], [], marker="o", linestyle="", markersize=4, color=colour, label=way))
    for row in sorted(planned, key=lambda row: -abs(row.off))[:LABELLED]:
        place = 100 * row.promised, 100 * row.paid  # type: ignore[operator]
        ax.annotate(row.arch, place, xytext=(4, 3), textcoords="offset points", fontsize=8)
    ax.set_xlabel("promised overhead, % of the plain step")
    ax.set_ylabel("paid overhead, % of the plain step")
    canvas.draw_grid(ax)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.finish(figure, ax, handles, is_ours, path)

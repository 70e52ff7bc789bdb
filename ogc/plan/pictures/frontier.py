"""Memory against overhead: the plans of a frontier, with other methods as named points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from . import canvas
from .canvas import BLUE, GREY, MIB, Axes, Figure, Location

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
    canvas.check_ending(path)
    others = {name: _peer(name, point) for name, point in peers.items()}
    figure, ax, is_ours = canvas.axes_of(ax, (8.0, 4.4))
    x = [size / MIB for size, _ in points]
    y = [overhead * 100 for _, overhead in points]
    handles = ax.plot(x, y, drawstyle="steps-post", color=BLUE, linewidth=1.5, marker="o", markersize=4, label="ogc")
    handles += ax.plot(
        [x[-1]], [y[-1]], "o", color=canvas.BLACK, markersize=9, clip_on=False, zorder=4,
        label=f"plain model, {canvas.mib(plain_peak)}",
    )  # fmt: skip
    label = f"lower bound of any plan, {canvas.mib(bound)}"
    handles.append(ax.axvline(bound / MIB, color=GREY, linestyle="--", linewidth=1.5, label=label))
    colours = (canvas.ORANGE, canvas.GREEN, canvas.PURPLE, canvas.RED, canvas.SKY, GREY)
    for number, (name, (size, overhead)) in enumerate(others.items()):
        style: dict[str, Any] = {"marker": _MARKERS[number % len(_MARKERS)], "color": colours[number % len(colours)]}
        handles += ax.plot(
            [size / MIB], [overhead * 100], linestyle="", markersize=9, markeredgecolor=canvas.BLACK, clip_on=False,
            zorder=5, label=f"{name}, {canvas.mib(size)} at {overhead:.0%}", **style,
        )  # fmt: skip
    ax.set_xlim(0, 1.05 * max([*x, *(size / MIB for size, _ in others.values()), 1e-9]))
    top = max([*y, *(overhead * 100 for _, overhead in others.values()), 1.0])
    ax.set_ylim(-0.03 * top, 1.1 * top)
    ax.set_xlabel("peak activation memory, MiB")
    ax.set_ylabel("recomputed time, % of a plain step")
    canvas.draw_grid(ax)
    return canvas.finish(figure, ax, handles, is_ours, path)


def _peer(name: str, point: Any) -> tuple[float, float]:
    try:
        size, overhead = map(float, point)
    except (TypeError, ValueError):
        size = overhead = float("nan")
    if not (0 <= size < float("inf") and 0 <= overhead < float("inf")):
        raise InputError(f"peer {name!r} must be (bytes, overhead as a share of the plain step), not {point!r}")
    return size, overhead

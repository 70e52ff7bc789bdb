"""Axes, legends, files and colours of all pictures; and the one place that asks for matplotlib.

Colours are those of Okabe and Ito, which people with any colour vision tell apart.

Raises:
    DependencyError: matplotlib is not installed.
"""

from __future__ import annotations

from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

from ...errors import DependencyError, InputError

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle
except ImportError as error:
    raise DependencyError("pictures need matplotlib, which is not installed: pip install matplotlib") from error

__all__ = ["Axes", "Figure", "Line2D", "Patch", "Rectangle"]  # what is drawn with

MIB = 2**20
FORMATS = (".png", ".svg", ".pdf")
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, PALE = "#767676", "#E4E4E4"

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

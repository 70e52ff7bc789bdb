"""The frontier: all plans of a graph that no other beats in both memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..graph import table
from .plan import Plan

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Frontier:
    """The curve of memory against overhead: each plan is faster and larger than the one before."""

    plans: tuple[Plan, ...]

    def plot(
        self,
        path: str | PathLike[str] | None = None,
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
        from .pictures.frontier import plot_frontier

        points, plain = [(plan.peak_bytes, plan.overhead) for plan in self.plans], self.plans[-1]
        return plot_frontier(points, plain.plain_peak_bytes, plain.lower_bound, peers or {}, path, ax)

    def __str__(self) -> str:
        rows = [
            [
                f"{plan.peak_bytes / 1e6:.1f}",
                f"{plan.peak_bytes / plan.plain_peak_bytes:.1%}" if plan.plain_peak_bytes else "-",
                f"{plan.overhead:.1%}",
                str(max((segment.depth for segment in plan.segments), default=0)),
            ]
            for plan in self.plans
        ]
        return table(["peak MB", "of plain", "overhead", "levels"], rows)

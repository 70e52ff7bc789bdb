"""Peaks of a step in CUDA's caching allocator: what is asked for, what blocks take, what is reserved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import PlanError
from ...graph import Graph, table
from ..decisions import Decisions, saved
from .allocator import CachingAllocator, DeviceFullError, Usage
from .requests import Move, requests
from .settings import DEFAULTS, AllocatorSettings

STEPS = 3
"""Steps that are replayed one after the other: each finds what those before it left, and may reserve more."""


@dataclass(frozen=True)
class Step:
    """A training step as the allocator sees it.

    Attributes:
        moves: of the forward and the backward.
        held: bytes of each tensor that is there before and throughout: parameters, their gradients, and so on.
        behind: bytes that the optimizer's step takes after the backward.
    """

    moves: tuple[Move, ...]
    held: tuple[int, ...] = ()
    behind: int = 0

    def peaks(
        self, settings: AllocatorSettings = DEFAULTS, device_bytes: int | None = None, steps: int = STEPS
    ) -> Usage:
        """The most bytes over some steps.

        Raises:
            DeviceFullError: they do not fit on a device that has ``device_bytes`` for the allocator.
        """
        allocator = CachingAllocator(settings, device_bytes)
        for size in self.held:
            allocator.allocate(size)
        for _ in range(steps):
            handles: dict[int, int] = {}
            for block, size in self.moves:
                if size > 0:
                    handles[block] = allocator.allocate(size)
                else:
                    allocator.free(handles.pop(block))
            if self.behind:
                allocator.free(allocator.allocate(self.behind))
        return allocator.peak

    def needed_bytes(self, settings: AllocatorSettings = DEFAULTS) -> int:
        """The smallest device, to 1 %, on which the steps run: there free segments are given back before it is full."""
        roomy = self.peaks(settings)
        least, most = roomy.allocated, roomy.reserved  # does not do, or is the answer; does
        while most - least > most // 100:
            middle = (least + most) // 2
            try:
                self.peaks(settings, middle)
                most = middle
            except DeviceFullError:
                least = middle
        return most


@dataclass(frozen=True)
class MemoryPeaks:
    """What CUDA's caching allocator is predicted to give for a plan.

    Attributes:
        planned: peaks of the plan's step.
        plain: those of the plain model's; None where the graph's operations are not the plain model's.
        settings: of the allocator.
    """

    planned: Usage
    plain: Usage | None
    settings: AllocatorSettings

    def __str__(self) -> str:
        header = ["predicted for CUDA's allocator", "requested MiB", "allocated MiB", "reserved MiB"]
        rows = [("plain", self.plain), ("planned", self.planned)]
        segments = "expandable" if self.settings.expandable_segments else "of fixed size"
        cells = [[name, *(f"{size / 2**20:.1f}" for size in peaks)] for name, peaks in rows if peaks is not None]
        return f"{table(header, cells)}\nsegments are {segments}"


def plain_moves(graph: Graph) -> tuple[Move, ...] | None:
    """The moves of the plain model's step; None where the graph's operations are not the plain model's."""
    if graph.plain_peak_bytes is not None:
        return None
    return requests(graph, Decisions((saved(0, len(graph)),), is_plain=True)).moves if len(graph) else ()


def moves_of(graph: Graph, decisions: Decisions) -> tuple[Move, ...] | None:
    """The moves of a plan's step; None for a plain plan where the graph's operations are not the plain model's."""
    return plain_moves(graph) if decisions.is_plain else requests(graph, decisions).moves


def memory_peaks(
    graph: Graph,
    decisions: Decisions,
    settings: AllocatorSettings,
    step: Callable[[tuple[Move, ...]], Step] = Step,
) -> MemoryPeaks:
    """The peaks of a plan and of the plain model, of a ``step`` around their moves; alone these are activations.

    Raises:
        PlanError: the plan is plain, and the graph's operations are not the plain model's.
    """
    plain = plain_moves(graph)
    plain_peaks = None if plain is None else step(plain).peaks(settings)
    moves = plain if decisions.is_plain else moves_of(graph, decisions)
    if moves is None:
        raise PlanError("this graph runs slice by slice, so the plain model's requests are not known")
    return MemoryPeaks(step(moves).peaks(settings), plain_peaks, settings)

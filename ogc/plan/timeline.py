"""Memory over a step as numbers to draw: edges and bytes of its events, by kind, and the copies of both queues.

Colours are those of Okabe and Ito, which people with any colour vision tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from ..graph import Graph
from .decisions import Decisions
from .queues import Copy, Queues, seconds_of
from .schedule import Schedule
from .simulate import Event, plain_peak, plain_timeline, trace

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


@dataclass(frozen=True)
class Timeline:
    """The numbers behind :meth:`ogc.Plan.plot` and :meth:`ogc.Plan.html`.

    Attributes:
        edges: where each event begins and the last ends, in operations run.
        layers: bytes at each event, by the names in ``LAYERS``.
        backward: where the backward begins.
        plain: edges and bytes of the plain model; None where they are not known.
        plain_peak: in bytes.
        is_plain: whether the plan is to run the plain model.
        copies: of offloaded values, each with from when to when, in operations run.
        events, plain_events: the operations that ran, in the plan and in the plain model.
    """

    edges: NDArray[np.float64]
    layers: dict[str, NDArray[np.int64]]
    backward: float
    plain: tuple[NDArray[np.float64], NDArray[np.int64]] | None
    plain_peak: int
    is_plain: bool
    copies: tuple[tuple[Copy, float, float], ...] = ()
    events: tuple[Event, ...] = ()
    plain_events: tuple[Event, ...] = ()

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
            copies=_copies(graph, decisions) if decisions.offloaded else (),
            events=tuple(moment.event for moment in moments),
            plain_events=events or (),
        )


def _copies(graph: Graph, decisions: Decisions) -> tuple[tuple[Copy, float, float], ...]:
    """When copies run, by the operations that run then: whoever waits stands still."""
    schedule = Schedule(graph, decisions)
    queues = Queues.of(schedule)
    seconds = seconds_of(schedule)
    for step, late in queues.waits:
        seconds[step] += late
    starts = [0.0, *accumulate(seconds)]

    def place(time: float) -> float:
        return float(np.interp(time, starts, range(len(starts))))

    return tuple((one, place(one.start), place(one.stop)) for one in queues.copies)


def _edges(events: Sequence[Event]) -> NDArray[np.float64]:
    """An operation run is 1 wide; those of its events that follow one another share that."""
    groups = (len([*group]) for _, group in groupby(events, lambda event: event[:3]))
    widths = [1 / size for size in groups for _ in range(size)]
    return np.concatenate([[0.0], np.cumsum(widths)])

"""The two queues of an offloading plan, one out of the device's memory and one back, first in, first out.

A copy takes its bytes over the queue's bandwidth. A step waits for the copies that the plan has ended before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..graph import Host
from .schedule import Schedule, Step, Trip


@dataclass(frozen=True)
class Copy:
    """A copy of a value, from when to when: seconds after the step began."""

    value: int
    is_out: bool
    start: float
    stop: float


@dataclass(frozen=True)
class Queues:
    """What the copies of a plan come to.

    Attributes:
        copies: in the order in which they are asked for.
        waits: the steps that wait, and for how many seconds.
        waiting: seconds that steps wait in all.
    """

    copies: tuple[Copy, ...] = ()
    waits: tuple[tuple[int, float], ...] = ()
    waiting: float = 0.0

    @classmethod
    def of(cls, schedule: Schedule) -> Queues:
        """Those of a schedule: no copies where it offloads nothing."""
        host, trips = schedule.graph.host, schedule.trips
        if host is None or not trips:
            return cls()
        starts = [0.0, *accumulate(seconds_of(schedule))]
        return replayed(host, trips, [value.bytes for value in schedule.graph.values], starts)


def seconds_of(schedule: Schedule) -> list[float]:
    """What each step takes by itself."""
    graph = schedule.graph

    def of_step(step: Step) -> float:
        op = graph.operations[step.operation]
        if step.is_backward:
            return op.backward_seconds + op.again_seconds
        return graph.repeat_seconds[step.operation] if step.run else op.forward_seconds

    return list(map(of_step, schedule.steps))


ASKED, GONE, BACK, NEEDED = range(4)
"""What may be before a step, in this order: a copy out is asked for, one ended; one back is asked for, one ended."""


def replayed(host: Host, trips: Mapping[int, Trip], sizes: Sequence[int], starts: Sequence[float]) -> Queues:
    """The queues of some trips.

    Args:
        host: with the bandwidths.
        trips: of values, by these.
        sizes: of all values, in bytes.
        starts: when each step would begin, and the last end, if none waited; in seconds.
    """
    moments: list[tuple[int, int, int, int]] = []  # (before which step, what, order, value)
    for v, (made, gone, back, needed) in trips.items():
        moments += [(made + 1, ASKED, v, v), (gone, GONE, v, v), (back, BACK, needed, v), (needed, NEEDED, v, v)]
    waiting = free_out = free_back = 0.0
    copies: list[Copy] = []
    ends: dict[tuple[int, bool], float] = {}
    waits: list[tuple[int, float]] = []
    for number, what, _, v in sorted(moments):
        now = starts[number] + waiting
        if what == ASKED:
            start, free_out = max(now, free_out), max(now, free_out) + sizes[v] / host.out
            copies.append(Copy(v, True, start, free_out))
            ends[v, True] = free_out
        elif what == BACK:
            start, free_back = max(now, free_back), max(now, free_back) + sizes[v] / host.back
            copies.append(Copy(v, False, start, free_back))
            ends[v, False] = free_back
        elif (late := ends[v, what == GONE] - now) > 0:
            waiting += late
            waits.append((number, late))
    return Queues(tuple(copies), tuple(waits), waiting)

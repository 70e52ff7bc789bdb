"""When values are away, given which are to be: as early gone as the queue allows, back as late as it needs.

Both ways a budget decides what is waited for. In the forward a value is waited for before an operation that would not
fit. In the backward it is fetched so late that its copy has just ended when it is needed, but no sooner than it fits.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ...plan.decisions import Offload
from ...plan.fast import Profile
from ...plan.schedule import Trip

SPARE = 1.25
"""How much longer than it takes a copy back is given: today's disk is not yesterday's."""


def timed(profile: Profile, values: Collection[int], budget: int) -> tuple[Offload, ...]:
    """The offloads of these values, without those that no backward needs, so that a plan fits a budget if it can.

    Args:
        profile: of the plan that saves them.
        values: that may be offloaded.
        budget: bytes.
    """
    away = [v for v in values if v in profile.needed]
    gone, waited = _left(profile, away, budget)
    return tuple(sorted(Offload(v, gone[v], back) for v, back in _returned(profile, gone, waited, budget).items()))


def _left(profile: Profile, away: list[int], budget: int) -> tuple[dict[int, int], float]:
    """The operations before which values are gone, and the seconds that the forward waits."""
    graph, starts = profile.graph, profile.starts
    assert graph.host is not None
    sizes, last_uses = [value.bytes for value in graph.values], graph.last_uses
    asked: dict[int, list[int]] = {}
    for v in sorted(away):
        asked.setdefault(graph.last_writes[v] + 1, []).append(v)
    bytes_of_step = profile.step_bytes.tolist()
    gone: dict[int, int] = {}
    queue: list[tuple[float, int]] = []  # when copies end, in this order, and their values
    waited = free = 0.0
    absent, end_of_forward = 0, graph.end
    for t in range(end_of_forward + 1):
        if not queue and t not in asked:
            continue
        now = starts[t] + waited
        for v in asked.get(t, ()):
            free = max(now, free) + sizes[v] / graph.host.out
            queue.append((free, v))
        for end, v in list(queue):
            is_wanted = t == end_of_forward or (t < len(bytes_of_step) and bytes_of_step[t] - absent > budget)
            if last_uses[v] < t and (end <= now or is_wanted):
                waited, now = waited + max(0.0, end - now), max(now, end)
                gone[v], absent = t, absent + sizes[v]
                queue.remove((end, v))
    return gone, waited


def _returned(profile: Profile, gone: dict[int, int], waited: float, budget: int) -> dict[int, int]:
    """The operations before whose backward values are fetched."""
    graph, starts, needed = profile.graph, profile.starts, profile.needed
    assert graph.host is not None
    seconds = {v: graph.values[v].bytes / graph.host.back for v in gone}
    order = sorted(gone, key=lambda v: (needed[v], v))
    latest, until = {}, float("inf")
    for v in reversed(order):
        until = latest[v] = min(until, starts[needed[v]]) - SPARE * seconds[v]
    load = profile.bytes_of_steps({v: Trip(0, place, needed[v], needed[v]) for v, place in gone.items()})
    places = np.array(_triggers(profile), np.int64)
    times = np.array(starts)[places]
    found, before = {}, 0
    free = 0.0
    for v in order:
        need, size = needed[v], graph.values[v].bytes
        place = max(
            int(places[max(0, np.searchsorted(times, latest[v], "right") - 1)]) if len(places) else need, before
        )
        if place < need and (over := np.flatnonzero(load[place:need] + size > budget)).size:
            place += 1 + int(over[-1])
        following = np.searchsorted(places, place)
        before = place = min(need, int(places[following]) if following < len(places) else need)
        load[place:need] += size
        free = max(starts[place] + waited, free) + seconds[v]
        waited += max(0.0, free - starts[need] - waited)
        found[v] = int(profile.during[place])
    return found


def _triggers(profile: Profile) -> list[int]:
    """The steps before which something may be fetched: the first of each backward that the model has."""
    ops, end = profile.graph.operations, profile.graph.end
    return sorted(
        n for t, n in profile.backwards.items() if t < end and (ops[t].backward_bytes or ops[t].backward_seconds)
    )

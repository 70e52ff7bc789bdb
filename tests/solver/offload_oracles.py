"""What offloading can come to: brute force over moments on small graphs, and a recurrence on chains.

The recurrence is that of Beaumont, Eyraud-Dubois and Shilova, "Efficient combination of rematerialization and
offloading for training DNNs" (2021), for chains of equal values. Copies are fluid in it: bytes leave as they are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from math import inf

from ogc.errors import PlanError
from ogc.graph import Graph
from ogc.plan import Decisions, Offload
from ogc.plan.decisions import cut_into_segments
from ogc.plan.fast import Cost, Profile, Replay

UNITS = 2
"""Into how many parts the recurrence divides a value."""


def all_moments(profile: Profile, values: tuple[int, ...]) -> Iterator[tuple[Offload, ...]]:
    """Every way to time the offloads of these values, those that come to the same once."""
    graph, ways = profile.graph, []
    for v in values:
        each = (Offload(v, g, b) for g in range(graph.last_uses[v] + 1, graph.end + 1) for b in range(graph.end))
        ways.append([*{profile.trips([one])[v]: one for one in each}.values()])
    return product(*ways)


def least_wait(profile: Profile, values: tuple[int, ...], budget: int) -> float:
    """The least added seconds within a budget of all ways to time the offloads of these values."""
    costs = map(profile.offloading, all_moments(profile, values))
    return min((cost.added_seconds for cost in costs if cost.peak_bytes <= budget), default=inf)


def every_plan(graph: Graph, most: int) -> list[Cost]:
    """Of all plans of one level, with up to ``most`` values offloaded at any moments, those that no other beats."""
    costs, found = Replay(graph), []
    inner = graph.cuts[1:-1]
    cuts = ((0, *chosen, len(graph)) for n in range(len(inner) + 1) for chosen in combinations(inner, n))
    trees = [cut_into_segments(c, modes) for c in cuts for modes in product((False, True), repeat=len(c) - 1)]
    sets = [values for n in range(most + 1) for values in combinations(sorted(graph.offloadable), n)]
    for tree, values in product(trees, sets):
        try:
            profile = costs.profile(Decisions(tree, offloaded=tuple(Offload(v, graph.end, 0) for v in values)))
        except PlanError:
            continue
        if all(v in profile.needed for v in values):
            found += map(profile.offloading, all_moments(profile, values))
    front: list[Cost] = []
    for cost in sorted(found):
        if not front or cost.added_seconds < front[-1].added_seconds:
            front.append(cost)
    return front


def chain_seconds(count: int, budget: int, bandwidth: int, forward: int = 1, backward: int = 2) -> float:
    """The least added seconds of a chain of ``count`` operations, each of which saves what it reads.

    Args:
        count: of operations, whose values have ``UNITS`` each; the last value is the output.
        budget: units that fit.
        bandwidth: units per second, each way.
        forward, backward: seconds of an operation.
    """
    q = UNITS

    @cache
    def best(i: int, kept: int, to_send: int, early: int, is_away: bool) -> float:
        """From the forward of operation i to its backward, both included, less what the plain step takes.

        ``kept`` stays, ``to_send`` still leaves; ``early`` is there of values before its own at the end of its
        backward; ``is_away``: its own input is offloaded.
        """
        found, own = inf, q * is_away
        for stop in range(i + 1, count + 1):  # operations that are recomputed at once; one alone is saved
            again = (stop - 1 - i) * forward
            wait = max(0, kept + to_send + min(2, stop - i) * q - budget)
            if wait > to_send or kept + own + early + q * (stop - i) > budget:
                continue
            left = max(0, to_send - wait - (stop - i) * forward * bandwidth)
            fetched = (again + (stop - i) * backward) * bandwidth
            for late, on_demand in product(range(early + 1), range(own + 1)):  # fetched while the backward waits
                owed = max(0, early - fetched - late) + own - on_demand
                cost = again + (wait + late + on_demand) / bandwidth
                if stop < count:
                    found = min(found, cost + best(stop, kept + q, left, owed, False))
                    found = min(found, cost + best(stop, kept, left + q, owed, True))
                elif not owed:
                    found = min(found, cost + left / bandwidth)
        return found

    return best(0, 0, 0, 0, False)

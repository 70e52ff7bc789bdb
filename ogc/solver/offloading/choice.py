"""Which values of a plan that takes too many bytes are offloaded: earliest made first, as long as some are over.

These have the longest time to leave and to return. What is not needed in the end stays, the longest copy first.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from ...errors import PlanError
from ...plan import Decisions
from ...plan.fast import Profile, Replay
from ..candidates import Candidate
from .timing import timed


def offloading(costs: Replay, plans: Iterable[Candidate], budget: int) -> Candidate | None:
    """The fastest plan within a budget that offloads what one of these has too much; None if there is none."""
    found = []
    for plan in plans:
        with suppress(PlanError):
            found.append(_relieved(costs, plan.decisions, budget))
    return min((one for one in found if one is not None), key=lambda one: (one.seconds, one.peak_bytes), default=None)


def timed_candidate(costs: Replay, decisions: Decisions, budget: int) -> Candidate:
    """Decisions with their simulated cost, where what they offload is away at the best moments for a budget.

    Raises:
        PlanError: as :func:`ogc.simulate` does.
    """
    values = [one.value for one in decisions.offloaded if one.value in costs.graph.offloadable]
    while True:
        offloaded = tuple(one for one in decisions.offloaded if one.value in values)
        profile = costs.profile(replace(decisions, offloaded=offloaded))
        needed = [v for v in values if v in profile.needed]
        if needed == values:
            if not costs.graph.fits_host(values):
                raise PlanError("the host has not so many bytes")
            return _candidate(profile, decisions, values, budget)
        values = needed


def _candidate(profile: Profile, decisions: Decisions, values: Iterable[int], budget: int) -> Candidate:
    offloaded = timed(profile, sorted(values), budget)
    cost = profile.offloading(offloaded)
    return Candidate(
        cost.peak_bytes, cost.added_seconds, replace(decisions, offloaded=offloaded, is_plain=False), cost.peak_values
    )


def _relieved(costs: Replay, decisions: Decisions, budget: int) -> Candidate | None:
    """The plan with as many values offloaded as it takes; None if that is not enough."""
    profile, graph = costs.profile(decisions), costs.graph
    chosen: set[int] = set()
    possible = sorted(graph.offloadable.intersection(profile.needed), key=lambda v: (graph.last_writes[v], v))
    while True:
        found = _candidate(profile, decisions, chosen, budget)
        if found.peak_bytes <= budget:
            break
        alive = profile.bytes_of_steps(profile.trips(found.decisions.offloaded))
        step, over = int(alive.argmax()), found.peak_bytes - budget
        more: list[int] = []
        for v in possible:
            is_at_peak = graph.last_uses[v] < step < profile.needed[v]
            if over > 0 and v not in chosen and is_at_peak and graph.fits_host((*chosen, *more, v)):
                more.append(v)
                over -= graph.values[v].bytes
        if not more:
            return None
        chosen.update(more)
    for v in sorted(chosen, key=lambda v: -graph.values[v].bytes):
        without = _candidate(profile, decisions, chosen - {v}, budget)
        if without.peak_bytes <= budget and without.seconds <= found.seconds:
            found, chosen = without, chosen - {v}
    # What is saved for good may keep internal tensors from the forward too.
    found = timed_candidate(costs, found.decisions, budget) if chosen else found
    return found if found.peak_bytes <= budget else None

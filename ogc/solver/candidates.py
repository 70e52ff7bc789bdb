"""Candidate plans that the simulator weighs: values and cuts dropped one by one, and selective checkpointing.

Selective checkpointing: a recomputed segment keeps what costs most time to make for its bytes. That is what
convolutions and matrix products make; normalisation, activations and sums are recomputed. Bytes are those of the value
and of the internal tensors that are kept with it. A threshold in seconds per byte holds for all values; which segments
keep, and at which of a few thresholds, is left to the search. One of them lies where the seconds per byte fall most:
between the products and everything else, if that is how they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product

import numpy as np

from ..errors import PlanError
from ..graph import Graph
from ..plan import Decisions, Segment, recomputed, saved
from ..plan.decisions import cut_into_segments
from ..plan.fast import Replay

DROP_SIMULATIONS = 2_000_000
"""Simulations for what may be dropped, times the square of the number of operations: in larger graphs each takes longer
and gains less."""

FINEST_SIMULATIONS = 60_000
"""Simulations for the plan that remakes every value, times the square of the number of operations."""


@dataclass(frozen=True, order=True)
class Candidate:
    """Decisions with their simulated peak, what they add in time, and the values alive at the peak."""

    peak_bytes: int
    seconds: float
    decisions: Decisions
    peak_values: tuple[int, ...] = field(default=(), compare=False)


def weigh(costs: Replay, decisions: Decisions) -> Candidate:
    """Decisions with their simulated cost.

    Raises:
        PlanError: as :func:`ogc.simulate` does.
    """
    peak, seconds, values = costs(decisions)
    return Candidate(peak, seconds, decisions, values)


def front_of(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other beats in both peak and time, by ascending peak."""
    front: list[Candidate] = []
    for candidate in sorted(candidates):
        if not front or candidate.seconds < front[-1].seconds:
            front.append(candidate)
    return front


def drop_one_by_one(costs: Replay, best: Candidate) -> Candidate:
    """The plan without the values and cuts that are better recomputed than kept, within ``DROP_SIMULATIONS``.

    Of the values alive at its peak and the cuts of its outermost level, the one or else the two whose loss helps
    most go, again and again.
    """
    graph = costs.graph
    asked = DROP_SIMULATIONS // max(1, len(graph)) ** 2
    before = None
    while best != before and asked > 0:
        before = best
        segments, recomputed_values = before.decisions.segments, before.decisions.recomputed_values
        kept = [v for v in before.peak_values if not graph.values[v].is_output and v not in recomputed_values]
        kept.sort(key=lambda v: -graph.values[v].bytes)
        joined = [
            (*segments[:number], recomputed(first.start, second.stop), *segments[number + 2 :])
            for number, (first, second) in enumerate(pairwise(segments))
        ]
        singles = [*((segments, (v,)) for v in kept), *((others, ()) for others in joined)]
        pairs = [*((segments, two) for two in combinations(kept, 2)), *product(joined, ((v,) for v in kept))]
        for losses in (singles, pairs):
            found = (_remaking(costs, *loss, before) for loss in losses[:asked])
            best = min((best, *found), key=lambda c: (c.peak_bytes, c.seconds))
            asked -= len(losses)
            if best != before or asked <= 0:
                break
    return best


def finest(costs: Replay, best: Candidate) -> Candidate:
    """The plan that cuts everywhere and remakes every value wherever it is used, if its peak is less.

    What its peak does not take is kept and saved after all, where that takes less time.
    """
    graph = costs.graph
    values = [v for v, value in enumerate(graph.values) if not value.is_output]
    if len(graph.cuts) - 1 + len(values) > FINEST_SIMULATIONS // max(1, len(graph)) ** 2:
        return best
    segments = cut_into_segments(graph.cuts, [True] * (len(graph.cuts) - 1))
    try:
        found = weigh(costs, Decisions(segments).recomputing(values))
    except PlanError:  # an operation would run twice that must not
        return best
    if found.peak_bytes >= best.peak_bytes:
        return best
    for value in values:
        policies = tuple(policy for policy in found.decisions.policies if policy[0] != value)
        found = min(found, weigh(costs, replace(found.decisions, policies=policies)))
    for number, segment in enumerate(segments):
        others = list(found.decisions.segments)
        others[number] = saved(segment.start, segment.stop)
        with suppress(PlanError):  # a value would stay that the user told to recompute
            found = min(found, weigh(costs, replace(found.decisions, segments=tuple(others))))
    return found


def _remaking(costs: Replay, segments: tuple[Segment, ...], lost: tuple[int, ...], plan: Candidate) -> Candidate:
    """The plan with these segments instead and these values recomputed too, or the plan itself if that cannot be."""
    try:
        return weigh(costs, replace(plan.decisions, segments=segments).recomputing(lost))
    except PlanError:  # an operation would run twice that must not
        return plan


SHARES = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Shares of the program's time that the values which may be kept make up, one for each threshold but that of the fall.
A few, as each is one more mode of every segment."""

SELECTIVE_SHARES = tuple(1 - np.geomspace(0.7, 0.005, 12))
"""Shares of the program's time that the values kept by selective plans make up; closer where little is made again."""

PARTS = 200
"""Segments of a selective plan at most: each looks at what comes before it."""

SELECTING = 10_000
"""Operations up to which selective plans are tried: each takes a simulation of as many runs as it has segments."""


def worth_keeping(graph: Graph, shares: Sequence[float] = SHARES) -> list[frozenset[int]]:
    """A set of values for each threshold, from the highest to the lowest, without those that are the same."""
    seconds = np.zeros(len(graph.values))
    size = np.array([0 if v.is_output else v.bytes for v in graph.values], np.int64)
    internal = np.zeros(len(size), np.int64)
    for op, again, stays in zip(graph.operations, graph.repeat_seconds, graph.keeps_internals, strict=True):
        for v in op.writes:
            seconds[v] += again
            internal[v] += 0 if stays else op.internal_bytes
    size[[*graph.told.recomputed]] = 0
    candidates = np.flatnonzero((size > 0) & (seconds > 0))
    worth = seconds[candidates] / (size + internal)[candidates]
    order = np.argsort(-worth, kind="stable")
    candidates, worth = candidates[order], worth[order]
    share = np.cumsum(seconds[candidates]) / sum(graph.repeat_seconds)
    counts = {int(np.searchsorted(share, s)) for s in shares}
    half = 1 + int(np.searchsorted(share, 0.5))
    falls = worth[half - 1 : -1] / worth[half:]
    if len(falls):
        counts.add(half + int(np.argmax(falls)))
    sets = [frozenset(int(v) for v in candidates[:count]) for count in sorted(counts) if count]
    return [*sets, *but_told(graph)]


def but_told(graph: Graph) -> list[frozenset[int]]:
    """The values that are left to keep where the user told to recompute some; no set where all may be saved."""
    if not graph.told.in_recomputed:
        return []
    others = (v for v, value in enumerate(graph.values) if not value.is_output and graph.producers[v] < graph.end)
    return [frozenset(others) - graph.told.recomputed]


def selective(costs: Replay) -> Iterator[Candidate]:
    """Plans that keep what is worth it by one threshold and recompute everything else wherever it is used.

    Tables keep all that crosses a cut, which is more where much costs next to nothing, as when time is FLOPs.
    """
    graph = costs.graph
    if len(graph) > SELECTING:
        return
    cuts = graph.cuts[: -1 : -(-len(graph.cuts) // PARTS)] + graph.cuts[-1:]
    for kept in worth_keeping(graph, SELECTIVE_SHARES):
        by_place = sorted(kept, key=graph.producers.__getitem__)
        edges = np.searchsorted([graph.producers[v] for v in by_place], cuts)
        segments = tuple(
            recomputed(start, stop, saved_values=by_place[first:last])
            for (start, stop), (first, last) in zip(pairwise(cuts), pairwise(edges), strict=True)
        )
        recomputed_values = (v for v, value in enumerate(graph.values) if not value.is_output and v not in kept)
        with suppress(PlanError):  # an operation would run twice that must not
            yield weigh(costs, Decisions(segments).recomputing(recomputed_values))

"""Candidate plans that the simulator weighs: values and cuts dropped one by one, and selective checkpointing.

Selective checkpointing: a recomputed segment keeps what costs more to make than to keep, at a price in seconds per
byte. To make a value takes its operation and, in turn, what that reads and no backward asks for. Bytes are those of the
value and of the internal tensors that are kept with it. Which segments keep, and at which of a few prices, is left to
the search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product, repeat
from math import inf

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


SHARES = (0.03, 0.08, 0.15, 0.25, 0.4, 0.6)
"""Shares of the program's time that are recomputed where sets of values are kept. A few, as each is one more mode of
every segment."""

SELECTIVE_SHARES = tuple(np.geomspace(0.005, 0.7, 12))
"""The same for selective plans; closer where little is recomputed."""

CLOSE_PRICES = 1.01
"""Ratio of two prices between which none is tried."""

PARTS = 200
"""Segments of a selective plan at most: each looks at what comes before it."""

SELECTING = 10_000
"""Operations up to which selective plans are tried: each takes a simulation of as many runs as it has segments."""


def worth_keeping(graph: Graph, shares: Sequence[float] = SHARES) -> list[frozenset[int]]:
    """A set of values for each share of the program's time that is recomputed where they are kept, from the largest
    share on, without those that are the same."""
    worth, whole = _Worth(graph), sum(graph.repeat_seconds)
    unit = whole / max(1, sum(worth.size))
    found = []
    for share, shared in [*zip(shares, repeat(False)), *zip(shares[1::2], repeat(True))]:
        low, high = 1e-4 * unit, 1e4 * unit
        while high > CLOSE_PRICES * low:
            price = (low * high) ** 0.5
            if worth.kept(price, shared)[1] <= share * whole:
                low = price
            else:
                high = price
        found.append(worth.kept(low, shared)[0])
    sets = sorted(filter(None, {*found}), key=lambda kept: (len(kept), sorted(kept)))
    return [*sets, *but_told(graph)]


class _Worth:
    """Which values are worth keeping at a price of bytes."""

    def __init__(self, graph: Graph) -> None:
        self.graph, operations = graph, graph.operations
        self.seconds = [
            again if op.replayable else inf for again, op in zip(graph.repeat_seconds, operations, strict=True)
        ]
        self.size = [0 if value.is_output else value.bytes for value in graph.values]
        self.with_internals: list[float] = [*self.size]  # which are kept with the values
        self.asked_for = {v for op in operations for v in op.saves}  # by some backward
        for op, stays in zip(operations, graph.keeps_internals, strict=True):
            if op.internal_bytes and not stays:
                self.asked_for.update(op.writes)
                for v in op.writes:
                    self.with_internals[v] += op.internal_bytes
        for v in graph.told.recomputed:
            self.with_internals[v] = inf  # so that it is never kept
        self.readers = Counter(v for op in operations for v in {*op.reads})
        self.known: dict[tuple[float, bool], tuple[frozenset[int], float]] = {}
        self.to_make = [
            (v, self.with_internals[v], self.seconds[t], [u for u in operations[t].reads if u != v])
            for v, (size, t) in enumerate(zip(self.size, graph.producers, strict=True))
            if size
        ]
        self.to_make.sort(key=lambda one: graph.producers[one[0]])

    def kept(self, price: float, shared: bool) -> tuple[frozenset[int], float]:
        """The values that are kept at so many seconds per byte, and the seconds of what is recomputed then.

        A value is kept where its bytes cost less than the operation that makes it and what that reads. What some
        backward asks for is there anyway; anything else is kept or made in its turn, for this one or, where that is
        ``shared``, for all that read it.
        """
        if (price, shared) not in self.known:
            self.known[price, shared] = self._kept(price, shared)
        return self.known[price, shared]

    def _kept(self, price: float, shared: bool) -> tuple[frozenset[int], float]:
        operations, producers, asked_for = self.graph.operations, self.graph.producers, self.asked_for
        cost = [0.0] * len(self.size)  # of having a value that no backward asks for
        is_kept = [True] * len(self.size)
        for v, size, again, reads in self.to_make:
            bytes_cost = price * size
            for u in reads:
                again += cost[u]
            is_kept[v] = bytes_cost <= again
            if v not in asked_for:
                cost[v] = min(bytes_cost, again) / (max(1, self.readers[v]) if shared else 1)
        recomputed_operations: set[int] = set()
        wanted, waiting = {*asked_for}, [*asked_for]
        while waiting:
            v = waiting.pop()
            if not is_kept[v] and producers[v] not in recomputed_operations:
                recomputed_operations.add(producers[v])
                for u in operations[producers[v]].reads:
                    if u not in wanted:
                        wanted.add(u)
                        waiting.append(u)
        kept = frozenset(v for v in wanted if is_kept[v] and self.size[v])
        return kept, sum(map(self.seconds.__getitem__, sorted(recomputed_operations)))


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


def inside_a_recomputation(graph: Graph, decisions: Decisions) -> Decisions:
    """The segments as parts of one that is recomputed, as far as nothing in it must run once."""
    groups: list[list[Segment]] = [[]]
    for segment in decisions.segments:
        if all(op.replayable for op in graph.operations[segment.start : segment.stop]):
            groups[-1].append(segment)
        else:
            groups += [[segment], []]
    segments = tuple(_joined(group) for group in groups if group)
    return replace(decisions, segments=segments, is_plain=False)


def _joined(group: list[Segment]) -> Segment:
    first, last = group[0], group[-1]
    if len(group) == 1 and ((first.parts and not first.saved_values) or first.start + 1 == first.stop):
        return first
    return recomputed(first.start, last.stop, *group)

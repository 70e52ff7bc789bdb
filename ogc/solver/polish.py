"""Local search over all that a plan can say: cuts, levels, policies of values and variants.

Simulated annealing from a plan that the search found. Moves are counted, and drawn from a fixed seed: a graph and a
goal give one plan, whatever the machine. Equal layers get the same move at once, or the segments of one of them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from random import Random
from typing import Any

from ..errors import PlanError
from ..graph import Graph
from ..plan import Decisions, Segment, recomputed, saved
from ..plan.decisions import Offload, Policies, Policy, clipped, cut_into_segments, fitted, shifted
from ..plan.fast import Replay
from ..process import is_late
from .candidates import Candidate
from .candidates import weigh as weigh_as_is

HOT, COOLING = 0.6, 0.025
"""By what share of an operation's part of the plain step a move may be worse that is taken one time in e, and what is
left of that at last."""

ROUNDS = 3
"""How often that is begun, from the best plan so far."""

LONG, FREED = 0.125, 0.02
"""Share of the program between where a value is made and last read from which on it is a long one; share of the plain
peak that all of these have to take for the first round to begin without them."""

FINEST = range(100, 301)
"""Operations of programs where the first round for the least peak begins between all cuts: in shorter ones other plans
are as near, in longer ones these take long to weigh."""

OFFLOAD = 0.5
"""How often a move of a policy is one of what is offloaded, where plans may do that."""

POLICY, VARIANT, STAMP, DEEPER, TWICE, ALIKE = 0.35, 0.1, 0.2, 0.4, 0.15, 0.35
"""How often a move is one of a policy, of a variant, else the segments of a layer put on others; goes a level deeper;
is followed by another before it is weighed; is made for all values and operations of equal layers."""

FEW_MOVES_STAMP = 0.6
"""The same for segments of a layer put on others where there are fewer moves than operations."""

SOME, CHANGED = 0.5, 0.5
"""How often that is done in some of the layers; a layer is changed before the others get its segments."""

PERIODS = 4
"""Lengths of layers that are looked at."""

OVER, BROKEN = 10.0, 0.02
"""What a plan costs that misses its bound: for each share of the plain step by which it does, and at least."""

BESIDE = 1e-5
"""What time counts beside the peak where that is asked for, and the other way."""


@dataclass(frozen=True)
class Aim:
    """The least time within a budget of bytes, or else the least peak, perhaps within so many seconds.

    Attributes:
        plain_bytes, plain_seconds: peak and time of the plain step.
    """

    plain_bytes: int
    plain_seconds: float
    budget: int | None = None
    seconds: float | None = None

    def excess(self, plan: Candidate) -> float:
        """By what share of the plain step a plan misses its bound."""
        if self.budget is not None:
            return max(0.0, (plan.peak_bytes - self.budget) / self.plain_bytes)
        return 0.0 if self.seconds is None else max(0.0, (plan.seconds - self.seconds) / self.plain_seconds)

    def price(self, plan: Candidate) -> float:
        """What less of is better, as a share of the plain step."""
        excess, peak, time = self.excess(plan), plan.peak_bytes / self.plain_bytes, plan.seconds / self.plain_seconds
        wanted, other = (peak, time) if self.budget is None else (time, peak)
        return wanted + BESIDE * other + (OVER * excess + BROKEN if excess else 0.0)

    def best(self, plans: Iterable[Candidate | None]) -> Candidate | None:
        """The best of those plans that keep the bound."""

        def rank(plan: Candidate) -> tuple[float, ...]:
            both = (plan.peak_bytes, plan.seconds)
            return both if self.budget is None else both[::-1]

        return min((plan for plan in plans if plan and not self.excess(plan)), key=rank, default=None)


Level = tuple[Segment, ...]

Weigh = Callable[[Replay, Decisions], Candidate]
"""Gives decisions their cost. PlanError: they cannot be carried out."""


def polished(
    costs: Replay,
    start: Candidate,
    aim: Aim,
    moves: int,
    nested: bool = True,
    enough: int = 0,
    weigh_away: Weigh | None = None,
) -> Candidate:
    """The best plan met in so many moves from one that was found.

    Args:
        costs: of the graph's plans.
        start: where to begin; what is returned is no worse.
        aim: what a plan is to be.
        moves: how many are tried.
        nested: whether segments may have levels and values be recomputed one by one, so that operations run more than
            twice.
        enough: bytes of a peak that ends it.
        weigh_away: what weighs plans that may offload, and says when values are away; without it none may.
    """
    weigh = weigh_away or weigh_as_is
    stamp = FEW_MOVES_STAMP if moves < len(costs.graph) else STAMP
    moving, random = _Moves(costs.graph, Random(0), nested, stamp, weigh_away is not None), Random(1)
    best, best_price = start, aim.price(start)
    now = _first(costs, start, aim, weigh) if nested else start
    price_now = aim.price(now)
    hot = HOT / len(costs.graph)
    for number in range(moves):
        if is_late() or best.peak_bytes <= enough:
            break
        if number and number * ROUNDS % moves < ROUNDS:
            now, price_now = best, best_price
        heat = hot * COOLING ** (number * ROUNDS / moves % 1)
        decisions = moving.moved(now)
        if decisions is None or decisions == now.decisions:
            continue
        if (found := _if_possible(costs, decisions, weigh_away)) is None:
            continue
        price_found = aim.price(found)
        if price_found <= price_now or random.random() < math.exp((price_now - price_found) / heat):
            now, price_now = found, price_found
            if price_found < best_price and not aim.excess(found):
                best, best_price = found, price_found
    return best if best is start else _tidied(costs, best, aim, weigh)


def _if_possible(costs: Replay, decisions: Decisions, weigh_away: Weigh | None) -> Candidate | None:
    """The plan with its cost; None where it cannot be carried out."""
    if weigh_away is None:
        cost = costs.if_possible(decisions)
        return None if cost is None else Candidate(cost.peak_bytes, cost.added_seconds, decisions, cost.peak_values)
    try:
        return weigh_away(costs, decisions)
    except PlanError:  # an operation would run twice that must not
        return None


def _first(costs: Replay, start: Candidate, aim: Aim, weigh: Weigh = weigh_as_is) -> Candidate:
    """Where the first round begins: with all long values made again, as cuts never let go of them.

    For the least peak whatever the time, in programs of some length, with all values made again between all cuts.
    """
    graph, decisions = costs.graph, start.decisions
    lengths = zip(graph.values, graph.producers, graph.last_uses, strict=True)
    remade = [v for v, (one, made, read) in enumerate(lengths) if read - made > LONG * len(graph) and not one.is_output]
    if aim.budget is None and aim.seconds is None and len(graph) in FINEST:
        decisions = Decisions(cut_into_segments(graph.cuts, [True] * (len(graph.cuts) - 1)))
        remade = [v for v, one in enumerate(graph.values) if not one.is_output]
    elif sum(graph.values[v].bytes for v in remade) <= FREED * aim.plain_bytes:
        return start
    try:
        return weigh(costs, decisions.recomputing(remade))
    except PlanError:  # an operation would run twice that must not
        return start


def _tidied(costs: Replay, best: Candidate, aim: Aim, weigh: Weigh) -> Candidate:
    """The plan without what it is no worse without: policies, offloads, variants, levels, and cuts between saved
    segments."""

    def or_simpler(best: Candidate, segments: Level | None = None, **others: Any) -> Candidate:
        decisions = replace(best.decisions, segments=segments or best.decisions.segments, **others)
        try:
            found = weigh(costs, decisions)
        except PlanError:  # an operation would run twice that must not
            return best
        return found if aim.price(found) <= aim.price(best) and not aim.excess(found) else best

    best = or_simpler(best, tuple(map(_without_vain_levels, best.decisions.segments)))
    for policy in best.decisions.policies:
        best = or_simpler(best, policies=tuple(each for each in best.decisions.policies if each != policy))
    for v, *_ in best.decisions.offloaded:
        best = or_simpler(best, offloaded=tuple(each for each in best.decisions.offloaded if each.value != v))
    for t in best.decisions.low_memory:
        best = or_simpler(best, low_memory=tuple(each for each in best.decisions.low_memory if each != t))
    for n in reversed(range(len(best.decisions.segments))):
        *before, one = best.decisions.segments[: n + 1]
        behind = best.decisions.segments[n + 1 :]
        if one.policies or len(one.parts) > 1:
            best = or_simpler(best, (*before, recomputed(one.start, one.stop), *behind))
        elif behind and not one.parts and not behind[0].parts:
            best = or_simpler(best, (*before, saved(one.start, behind[0].stop), *behind[1:]))
    return best


def _without_vain_levels(one: Segment) -> Segment:
    """A segment without levels that are recomputed as a whole by the level around them."""
    parts = tuple(map(_without_vain_levels, one.parts))
    if len(parts) == 1 and parts[0].parts:
        return replace(parts[0], policies=tuple({**dict(parts[0].policies), **dict(one.policies)}.items()))
    return replace(one, parts=parts)


class _Moves:
    """Random changes of a plan of one graph."""

    def __init__(
        self, graph: Graph, random: Random, nested: bool, stamp: float = STAMP, offloads: bool = False
    ) -> None:
        self.graph, self.random, self.nested, self.stamp = graph, random, nested, stamp
        self.cuts, self.is_cut = graph.cuts, frozenset(graph.cuts)
        self.may_leave = sorted(graph.offloadable) if offloads else []
        self.values = [v for v, value in enumerate(graph.values) if not value.is_output]
        kinds: dict[object, list[int]] = {}
        for t, key in enumerate(map(self._look, range(len(graph)))):
            kinds.setdefault(key, []).append(t)
        self.alike = {t: operations for operations in kinds.values() for t in operations}
        self.layers = [*_layers([operations[0] for operations in map(self.alike.__getitem__, range(len(graph)))])]
        self.of_level = [self._shift] * 3 + [self._merge, self._split, self._toggle] + [self._nest] * nested

    def _look(self, t: int) -> object:
        """Equal for an operation and those that do the same in other layers."""
        op, values = self.graph.operations[t], self.graph.values
        sizes = tuple(values[v].bytes for v in op.writes)
        return op.target, re.sub(r"\d+", "", op.module), op.source, sizes, len(op.reads)

    def moved(self, now: Candidate) -> Decisions | None:
        """Another plan; None where this move cannot be made."""
        found = self._moved(now.decisions, now.peak_values)
        if found is not None and self.random.random() < TWICE:
            return self._moved(found, now.peak_values) or found
        return found

    def _moved(self, decisions: Decisions, peak_values: Sequence[int]) -> Decisions | None:
        kind = self.random.random()
        if kind < POLICY:
            if self.may_leave and self.random.random() < OFFLOAD:
                return self._offload(decisions, peak_values)
            return self._policy(decisions, peak_values)
        if kind < POLICY + VARIANT:
            return self._variant(decisions)
        segments = self._level(decisions.segments)
        return None if segments is None else replace(decisions, segments=segments)

    def _policy(self, decisions: Decisions, peak_values: Sequence[int]) -> Decisions | None:
        """Another policy for a value, one that is alive at the peak as often as not."""
        random, policies = self.random, dict(decisions.policies)
        pools = [peak_values, peak_values, [*policies], self.values]
        pool = random.choice([pool for pool in pools if pool] or [[]])
        if not pool or self.graph.values[value := random.choice(pool)].is_output:
            return None
        possible = (None, Policy.SAVED, Policy.RECOMPUTED)[: 2 + self.nested]
        policy = random.choice([other for other in possible if other is not policies.get(value)])
        for v in self._values_alike(value) if random.random() < ALIKE else [value]:
            if policy is None:
                policies.pop(v, None)
            else:
                policies[v] = policy
        return replace(decisions, policies=tuple(sorted(policies.items())))

    def _offload(self, decisions: Decisions, peak_values: Sequence[int]) -> Decisions | None:
        """A value offloaded that was not, or the other way, or one in the place of another."""
        random, graph, away = self.random, self.graph, {one.value: one for one in decisions.offloaded}
        pools = [pool for pool in (peak_values, [*away], self.may_leave) if pool]
        if not pools or (value := random.choice(random.choice(pools))) not in graph.offloadable:
            return None
        others = self._values_alike(value) if random.random() < ALIKE else [value]
        changed, is_away = graph.offloadable.intersection(others), value in away
        if not is_away and away and random.random() < SOME:
            away.pop(random.choice([*away]))
        for v in changed:
            if is_away:
                away.pop(v, None)
            else:  # whoever weighs the plan knows better when
                away[v] = Offload(v, graph.end, graph.last_uses[v])
        return replace(decisions, offloaded=tuple(sorted(away.values())))

    def _values_alike(self, value: int) -> list[int]:
        operations, t = self.graph.operations, self.graph.producers[value]
        place = operations[t].writes.index(value)
        return [operations[other].writes[place] for other in self._some_alike(t)]

    def _some_alike(self, t: int) -> list[int]:
        """An operation and those that do the same in layers beside it, or in all."""
        alike = self.alike[t]
        if self.random.random() >= SOME:
            return alike
        n = bisect_left(alike, t)
        return alike[self.random.randint(0, n) : self.random.randint(n, len(alike)) + 1]

    def _variant(self, decisions: Decisions) -> Decisions | None:
        """The other variant for an operation."""
        if not self.graph.low_memory:
            return None
        chosen = self.random.choice(self.graph.low_memory)
        alike = self._some_alike(chosen) if self.random.random() < ALIKE else [chosen]
        others, low = {*alike}.intersection(self.graph.low_memory), {*decisions.low_memory}
        return replace(decisions, low_memory=tuple(sorted(low - others if chosen in low else low | others)))

    # -- segments --------------------------------------------------------------------------------------------

    def _level(self, segments: Level) -> Level | None:
        """A change of the segments of some level."""
        inner = [n for n, one in enumerate(segments) if one.parts and one.stop - one.start > 2] if self.nested else []
        if not inner or self.random.random() >= DEEPER:
            if self.layers and self.random.random() < self.stamp:
                return self._stamp(segments)
            return self.random.choice(self.of_level)(segments)
        n = self.random.choice(inner)
        parts = self._level(segments[n].parts)
        return parts and (*segments[:n], replace(segments[n], parts=parts), *segments[n + 1 :])

    def _shift(self, segments: Level) -> Level | None:
        """A cut between two segments somewhere near."""
        if len(segments) < 2:
            return None
        n = self.random.randrange(len(segments) - 1)
        by = self.random.choice((-1, 1)) * self.random.choice((1, 1, 1, 2, 3, 5))
        place = bisect_left(self.cuts, segments[n].stop) + by
        first, second = segments[n : n + 2]
        if not (0 < place < len(self.cuts) and first.start < (cut := self.cuts[place]) < second.stop):
            return None
        both = self._fitted(first, first.start, cut), self._fitted(second, cut, second.stop)
        return (*segments[:n], *both, *segments[n + 2 :])

    def _merge(self, segments: Level) -> Level | None:
        """One segment in the place of two."""
        if len(segments) < 2:
            return None
        n = self.random.randrange(len(segments) - 1)
        first, second = segments[n : n + 2]
        ends, policies = (first.start, second.stop), first.policies + second.policies
        choices = [saved(*ends), replace(recomputed(*ends), policies=policies)]
        if not first.parts and not second.parts:
            choices = [saved(*ends)]
        elif self.nested and first.parts and second.parts:
            choices = [
                choices[1],
                Segment(*ends, first.parts + second.parts, policies),
                recomputed(*ends, first, second),
            ]
        return (*segments[:n], self.random.choice(choices), *segments[n + 2 :])

    def _split(self, segments: Level) -> Level | None:
        """Two segments in the place of one, of which one may be recomputed in the place of saved or the other way."""
        n = self.random.randrange(len(segments))
        if (cut := self._cut_in(segments[n])) is None:
            return None
        one = segments[n]
        both = [self._fitted(one, one.start, cut), self._fitted(one, cut, one.stop)]
        changed = self.random.randrange(4)
        if changed < len(both):
            both[changed] = _toggled(both[changed])
        return (*segments[:n], *both, *segments[n + 1 :])

    def _toggle(self, segments: Level) -> Level:
        """A segment recomputed in the place of saved, or the other way."""
        n = self.random.randrange(len(segments))
        return (*segments[:n], _toggled(segments[n]), *segments[n + 1 :])

    def _nest(self, segments: Level) -> Level | None:
        """A recomputed segment with parts in the place of none, or none in the place of some."""
        n = self.random.randrange(len(segments))
        one = segments[n]
        if not one.parts:
            return None
        if len(one.parts) > 1 and self.random.random() < 0.5:
            parts: Level = (saved(one.start, one.stop),)
        elif (cut := self._cut_in(one)) is None:
            return None
        else:
            parts = (recomputed(one.start, cut), saved(cut, one.stop))
            if self.random.random() < 0.3:
                parts = (saved(one.start, cut), recomputed(cut, one.stop))
        return (*segments[:n], replace(one, parts=parts), *segments[n + 1 :])

    def _cut_in(self, one: Segment) -> int | None:
        first, last = bisect_left(self.cuts, one.start) + 1, bisect_left(self.cuts, one.stop)
        return self.cuts[self.random.randrange(first, last)] if first < last else None

    def _stamp(self, segments: Level) -> Level | None:
        """The segments of one layer, changed or as they are, for those beside it too."""
        length, first, last = self.random.choice(self.layers)
        low, high = max(first, segments[0].start), min(last, segments[-1].stop)
        starts = [one.start for one in segments if low <= one.start <= high - length]
        if not starts:
            return None
        start = self.random.choice(starts)
        before, after = (start - low) // length, (high - length - start) // length
        if self.random.random() < SOME:
            before, after = self.random.randint(0, before), self.random.randint(0, after)
        edges = range(start - before * length, start + (after + 2) * length, length)
        if len(edges) < 3 or not self.is_cut.issuperset(edges):
            return None
        before_them, layer, behind_them = (
            (*clipped(segments, *ends, self._is_made_within),)
            for ends in ((0, edges[0]), (start, start + length), (edges[-1], len(self.graph)))
        )
        if self.random.random() < CHANGED:
            layer = self._level(layer) or layer
        further = ((edge - start, partial(self._policies_further, edge - start)) for edge in edges[:-1])
        stamped = (shifted(one, *by) for by in further for one in layer)
        return (*before_them, *stamped, *behind_them)

    def _policies_further(self, by: int, policies: Policies) -> Policies:
        """The policies of the values that take the places of these so many operations further on."""
        operations, producers = self.graph.operations, self.graph.producers
        found: dict[int, Policy] = {}
        for value, policy in policies:
            there = operations[producers[value] + by].writes
            place = operations[producers[value]].writes.index(value)
            if place < len(there) and producers[there[place]] == producers[value] + by:
                found[there[place]] = policy
        return tuple(sorted(found.items()))

    def _fitted(self, one: Segment, start: int, stop: int) -> Segment:
        return fitted(one, start, stop, self._is_made_within)

    def _is_made_within(self, value: int, start: int, stop: int) -> bool:
        return start <= self.graph.producers[value] < stop


def _toggled(one: Segment) -> Segment:
    return saved(one.start, one.stop) if one.parts else recomputed(one.start, one.stop)


def _layers(kinds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The length of layers that follow one another, and where the first starts and the last stops."""
    last: dict[int, int] = {}
    lengths: Counter[int] = Counter()
    for t, kind in enumerate(kinds):
        if t - last.get(kind, t) > 1:
            lengths[t - last[kind]] += 1
        last[kind] = t
    for length, _ in lengths.most_common(PERIODS):
        same = [one == other for one, other in zip(kinds, kinds[length:], strict=False)]
        start = 0
        for is_same, run in groupby(same):
            stop = start + len([*run])
            if is_same and stop - start >= length:
                yield length, start, stop + length
            start = stop

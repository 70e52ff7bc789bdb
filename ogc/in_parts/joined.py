"""One graph for a step of a model in parts: the graphs of all calls, with plain Python between them.

    region 0, call 0, region 1, call 1, ..., region n

A region is one operation that no plan recomputes; it reads what the last call returned. What plain modules hold is
measured, and weighs on regions and on the backwards of calls. So the search for one plan serves all parts: a plan of
the graph, cut at the regions, is a plan of each call. Two things are not in the graph: calls of one part share a plan,
and a forward may run backwards inside. So the events of the real step, in their order, have the last word on a peak.
Nothing here needs torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

from ..errors import SolveError
from ..graph import Graph, Operation, RuntimeCosts, Told, Value
from ..plan import Decisions, Plan, Segment, make_plan, plain_plan, saved
from ..plan.decisions import Policies, Policy, clipped, shifted
from ..plan.schedule import FORWARD, Schedule
from ..plan.simulate import Memory
from ..solver import FAIR, FAIR_OVERHEAD, LEAST_PEAK, NEGLIGIBLE, Goal, SolveOptions

Choice = tuple[Plan, ...]
"""The plan of each part."""

Key = tuple[str, int]
"""What happens, and the number of the call or region to which it does."""

CALL, BACK, REGION, REGION_BACK = "call", "back", "region", "region back"
"""What happens: a call forward or backward, a region in the forward or in the backward of the step."""


@dataclass(frozen=True)
class Event:
    """A stage of a step.

    Attributes:
        key: what happens.
        outside: most bytes alive then beside those of parts.
        ends: whether the call keeps nothing behind this backward.
        backward: the number of the backward that a call's is part of.
    """

    key: Key
    outside: int = 0
    ends: bool = True
    backward: int = 0


def usual_events(calls: int) -> tuple[Event, ...]:
    """The forward of so many calls, then their backward."""
    forward = [Event((kind, n)) for n in range(calls) for kind in (REGION, CALL)]
    backward = [Event((kind, n)) for n in reversed(range(calls)) for kind in (BACK, REGION_BACK)]
    return (*forward, Event((REGION, calls)), Event((REGION_BACK, calls)), *backward)


@dataclass(frozen=True)
class PartCost:
    """What a plan of a part takes, in bytes: kept until its backward, and the most in its forward and its backward."""

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int

    @property
    def most(self) -> int:
        """The most at any time."""
        return max(self.forward_bytes, self.backward_bytes)

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> PartCost:
        """That of a plan for this graph."""
        step = Joined((graph,))
        most = {event.key: most for event, (_, most) in zip(step.events, step.sizes((plan,)), strict=True)}
        return cls(step.saved((plan,))[0][0], most[CALL, 0], most[BACK, 0])


@dataclass(frozen=True, eq=False)
class Joined:
    """A step of a model in parts.

    Attributes:
        parts: their graphs.
        calls: the part of each call, in the order of the forward.
        names: of the parts.
        events: of a step, in order.
        saved_again: for each call, bytes that it saves and that derivatives of its gradients hold too, one number each
            time that these are taken: what it does not keep is made again for them.
    """

    parts: tuple[Graph, ...]
    calls: tuple[int, ...] = (0,)
    names: tuple[str, ...] = ("",)
    events: tuple[Event, ...] = usual_events(1)
    saved_again: tuple[tuple[int, ...], ...] = ((),)

    @property
    def runs_backward_inside(self) -> bool:
        """Whether a backward runs inside the forward."""
        kinds = [event.key[0] for event in self.events]
        return BACK in kinds[: kinds.index(REGION_BACK)]

    # -- the graph -------------------------------------------------------------------------------------------

    @cached_property
    def regions(self) -> tuple[int, ...]:
        """The positions of the regions."""
        return tuple(accumulate((1 + len(self.parts[part]) for part in self.calls), initial=0))

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """For each region its value; those of the call after it follow."""
        return tuple(accumulate((1 + len(self.parts[part].values) for part in self.calls), initial=0))

    def graph(self, weights: Mapping[Key, int], plain: Sequence[bool] = ()) -> Graph:
        """The graph of all calls, with bytes that are outside of parts; ``plain`` parts are as the model has them."""
        of_parts = [
            graph.of_the_plain_model if is_plain else graph
            for graph, is_plain in zip(self.parts, plain or [False] * len(self.parts), strict=True)
        ]
        operations: list[Operation] = []
        values: list[Value] = []
        for n, part in enumerate(self.calls):
            operations += [self._region(n, weights), *self._call(n, of_parts[part], weights.get((BACK, n), 0))]
            values += [Value(f"region {n}", 0), *(self._value(n, value) for value in of_parts[part].values)]
        operations.append(self._region(len(self.calls), weights))
        values.append(Value("end", 0))
        costs, first = [graph.runtime for graph in self.parts], self.parts[0]
        # What the plain model's own Python takes is left out, so that a plan takes no more time than it seems to.
        runtime = RuntimeCosts(
            run=max(cost.run for cost in costs),
            saved_tensor=max(cost.saved_tensor for cost in costs),
            overlapped=sum(costs[part].overlapped for part in self.calls),
        )
        told = self._told([graph.told for graph in of_parts])
        return Graph(
            tuple(operations), tuple(values), device=first.device, profile=first.profile, runtime=runtime, told=told
        )

    def _told(self, of_parts: Sequence[Told]) -> Told:
        """What all calls together keep to."""
        words = dict.fromkeys(told.words for told in of_parts if told)
        sets: tuple[set[int], ...] = set(), set(), set()
        for n, part in enumerate(self.calls):
            told, value, operation = of_parts[part], self.firsts[n] + 1, self.regions[n] + 1
            sets[0].update(v + value for v in told.saved)
            sets[1].update(v + value for v in told.recomputed)
            sets[2].update(t + operation for t in told.in_recomputed)
        saved, recomputed, in_recomputed = map(frozenset, sets)
        return Told(saved, recomputed, in_recomputed, " and ".join(words))

    def _region(self, n: int, weights: Mapping[Key, int]) -> Operation:
        """A region; as its backward needs a value that it alone makes, a segment that is recomputed never has it."""
        last, own = self.parts[self.calls[n - 1]].values if n else (), self.firsts[n]
        return Operation(
            f"region {n}",
            "plain Python",
            reads=tuple(own - len(last) + v for v, value in enumerate(last) if value.is_output or value.is_returned),
            writes=(own,),
            saves=(own,),
            scratch_bytes=max(0, weights.get((REGION, n), 0)),
            backward_bytes=max(0, weights.get((REGION_BACK, n), 0)),
            replayable=False,
        )

    def _call(self, n: int, graph: Graph, outside: int) -> Iterator[Operation]:
        first, name = self.firsts[n] + 1, self.names[self.calls[n]]
        for op in graph.operations:
            moved = op.renumbered(range(first, first + len(graph.values)))
            module = f"{name}.{op.module}" if op.module else name
            yield _heavier(replace(moved, name=f"{n}.{op.name}", module=module), max(0, outside))

    def _value(self, n: int, value: Value) -> Value:
        until = None if value.held_until is None else min(self.regions[n] + 1 + value.held_until, self.regions[n + 1])
        return Value(f"{n}.{value.name}", value.bytes, held_until=until)

    # -- plans of the graph, and of calls --------------------------------------------------------------------

    def decisions(self, choice: Choice) -> Decisions:
        """The plans of all parts as one of the graph."""
        segments: list[Segment] = []
        policies: list[tuple[int, Policy]] = []
        variants: list[int] = []
        for n, part in enumerate(self.calls):
            one, region, moved = choice[part].decisions, self.regions[n], partial(_renumbered, self.firsts[n] + 1)
            segments += [saved(region, region + 1), *(shifted(segment, region + 1, moved) for segment in one.segments)]
            policies += moved(one.policies)
            variants += [region + 1 + t for t in one.low_memory]
        return Decisions((*segments, saved(self.regions[-1], self.regions[-1] + 1)), tuple(policies), tuple(variants))

    @property
    def may_be_plain(self) -> bool:
        """Whether plain parts keep to what is told."""
        return all(graph.may_be_plain for graph in self.parts)

    def plan_of_call(self, n: int, decisions: Decisions, solver: str) -> Plan:
        """A plan of the graph as that of a call."""
        graph, start, first = self.parts[self.calls[n]], self.regions[n] + 1, self.firsts[n] + 1
        stop, end = start + len(graph), first + len(graph.values)
        own = clipped(decisions.segments, start, stop, lambda v, *_: first <= v < end)
        segments = tuple(shifted(segment, -start, partial(_renumbered, -first)) for segment in own)
        variants = tuple(t - start for t in decisions.low_memory if start <= t < stop)
        if not variants and not any(segment.parts for segment in segments):
            return plain_plan(graph)
        policies = _renumbered(-first, tuple(each for each in decisions.policies if first <= each[0] < end))
        return make_plan(graph, Decisions(segments, policies, variants), solver)

    def with_call(self, name: str, graph: Graph, beside: int) -> Joined:
        """The same with a call of one more part, which is as the call before it; what it gives is held outside, too."""
        place, last_back = beside + 1, max(n for n, event in enumerate(self.events) if event.key == (BACK, beside))
        given = sum(value.bytes for value in graph.values if value.is_output)
        events: list[Event] = []
        more = 0
        for n, event in enumerate(self.events):
            (kind, number), outside = event.key, event.outside + more
            if n == last_back:
                events += [Event((BACK, place), event.outside), Event((REGION_BACK, place), event.outside)]
                more, outside = 0, event.outside
            events.append(replace(event, key=(kind, number + (number >= place)), outside=outside))
            if event.key == (CALL, beside):
                events += [Event((REGION, place), event.outside), Event((CALL, place), event.outside)]
                more = given
        return Joined(
            (*self.parts, graph),
            (*self.calls[:place], len(self.parts), *self.calls[place:]),
            (*self.names, name),
            tuple(events),
            (*self.saved_again[:place], self.saved_again[beside], *self.saved_again[place:]),
        )

    # -- what a choice takes ---------------------------------------------------------------------------------

    @cached_property
    def plain(self) -> Choice:
        """Every part as it is."""
        return tuple(map(plain_plan, self.parts))

    @property
    def part_seconds(self) -> float:
        """The time of a plain step in parts."""
        return sum(self.parts[part].step_seconds for part in self.calls)

    def seconds(self, choice: Choice) -> float:
        """The time that a choice adds to a step."""
        backwards = Counter(key for key, _ in {(event.key, event.backward) for event in self.events})
        plans = [(choice[part], max(1, backwards[BACK, n])) for n, part in enumerate(self.calls)]
        return sum(plan.added_seconds * count for plan, count in plans if not plan.is_plain)

    def peak(self, choice: Choice) -> int:
        """Most bytes alive at once."""
        key = tuple(plan.decisions for plan in choice)
        if key not in self._peaks:
            sizes = zip(self.sizes(choice), self.events, strict=True)
            self._peaks[key] = max(most + event.outside for (_, most), event in sizes)
        return self._peaks[key]

    @cached_property
    def _peaks(self) -> dict[tuple[Decisions, ...], int]:
        return {}

    def sizes(self, choice: Choice, events: Sequence[Event] | None = None) -> list[tuple[int, int]]:
        """For each event, the bytes of parts when it begins and the most during it."""
        schedule = self._schedule(choice)
        memory, found, held = Memory(schedule), [], Counter[int]()
        again = [sum(min(size, missing) for size in sizes) for sizes, missing in self._missing(choice)]
        steps: dict[Key, list[int]] = {}
        for number, step in enumerate(schedule.steps):
            steps.setdefault(self._key(step.operation, number >= len(schedule.graph)), []).append(number)
        for event in self.events if events is None else events:
            kind, n = event.key
            own, gradients = 0, 0
            if kind == BACK:
                own, gradients = held.pop(n, 0), schedule.graph.operations[self.regions[n + 1] - 1].gradient_bytes
            before = dict(memory.live), memory.live_bytes, dict(memory.internals), memory.internal_bytes
            begin, seen = memory.live_bytes + memory.internal_bytes, len(memory.timeline)
            for number in steps.get(event.key, ()) if kind == BACK else steps.pop(event.key, ()):
                memory.take(number, schedule.steps[number])
            most = max((one.bytes for one in memory.timeline[seen:]), default=begin)
            found.append((begin + gradients + held.total(), most + held.total()))
            if kind == CALL:
                held[n] = again[n]
            elif kind == BACK and not event.ends:
                memory.live, memory.live_bytes, memory.internals, memory.internal_bytes = before
                held[n] = own
        return found

    def saved(self, choice: Choice) -> list[tuple[int, int]]:
        """For each call, the bytes that stay until its backward, and those among them that no plain backward needs."""
        schedule = self._schedule(choice)
        found = [[0, 0] for _ in self.calls]
        needed = {v for op in schedule.graph.of_the_plain_model.operations for v in op.saves}
        for (run, v), last in schedule.last_needs.items():
            kind, n = self._key(schedule.graph.producers[v])
            if kind == CALL and run == FORWARD and last >= len(schedule.graph):
                of_call = found[n]
                of_call[0] += schedule.graph.values[v].bytes
                of_call[1] += 0 if v in needed else schedule.graph.values[v].bytes
        for t, (op, keeper) in enumerate(zip(schedule.graph.operations, schedule.keepers, strict=True)):
            if keeper == FORWARD and op.internal_bytes:
                found[self._key(t)[1]][0] += op.internal_bytes
        return [(kept, beyond) for kept, beyond in found]

    def _missing(self, choice: Choice) -> list[tuple[tuple[int, ...], int]]:
        """For each call, what derivatives of its gradients save again, and what there is to be made again for that."""
        if not any(self.saved_again):
            return [((), 0)] * len(self.calls)
        both = zip(self.saved(choice), self.saved(self.plain), strict=True)
        missing = [max(0, plain - kept + beyond) for (kept, beyond), (plain, _) in both]
        return list(zip(self.saved_again, missing, strict=True))

    def _key(self, operation: int, is_backward: bool = False) -> Key:
        """The event that an operation belongs to."""
        number = bisect_right(self.regions, operation) - 1
        kinds = (REGION, REGION_BACK) if self.regions[number] == operation else (CALL, BACK)
        return kinds[is_backward], number

    def _schedule(self, choice: Choice) -> Schedule:
        return Schedule(self.graph({}, [plan.is_plain for plan in choice]), self.decisions(choice))


def _heavier(op: Operation, outside: int) -> Operation:
    """An operation in whose backward there is so much more."""
    if not outside:
        return op
    late, plain, variant = op.late_bytes, op.plain_backward_bytes, op.low_memory
    if variant is not None:
        late_of_variant = variant.late_bytes and variant.late_bytes + outside
        variant = replace(variant, backward_bytes=variant.backward_bytes + outside, late_bytes=late_of_variant)
    return replace(
        op,
        gradient_bytes=op.gradient_bytes + outside,
        backward_bytes=op.backward_bytes + outside,
        late_bytes=late and late + outside,
        plain_backward_bytes=None if plain is None else plain + outside,
        low_memory=variant,
    )


def _renumbered(by: int, policies: Policies) -> Policies:
    return tuple((v + by, policy) for v, policy in policies)


ATTEMPTS = 8
"""How often less is asked of the search, where its plan takes more in the real step than in the graph."""

Rank = Callable[[Choice], tuple[float, ...]]
"""What less of is better, the most important first."""


@dataclass(frozen=True)
class Chooser:
    """Chooses plans of parts.

    Attributes:
        step: with what is outside of the parts.
        known: a choice that saves little; what is outside is as it is beside that.
        solving: by what plans are found, but for the goal.
    """

    step: Joined
    known: Choice
    solving: SolveOptions

    def chosen(self, goal: Goal) -> Choice | None:
        """The best choice found for a goal, the plain one if that is as good; None if nothing fits the budget."""
        step, plain = self.step, self.step.plain
        budget, share = goal.budget_bytes(step.peak(plain)), goal.max_overhead
        if budget is not None:
            best = self._best(budget, step.peak, lambda c: (step.seconds(c), step.peak(c)), self._within_bytes)
            return best if step.peak(best) <= budget else None

        def by_peak(choice: Choice) -> tuple[float, ...]:
            return step.peak(choice), step.seconds(choice)

        if goal.is_least:
            best = self._best(0, lambda c: 0, by_peak, lambda _, rank: self._of_goal(goal, rank))
        else:
            limit = (FAIR_OVERHEAD if share is None else share) * step.part_seconds
            best = self._best(
                limit, step.seconds, by_peak, partial(self._within_seconds, limit if share is None else None)
            )
        return best if (1 + NEGLIGIBLE) * step.peak(best) < step.peak(plain) or not step.may_be_plain else plain

    def _best(
        self, limit: float, takes: Callable[[Choice], float], cost: Rank, search: Callable[[float, Rank], Choice]
    ) -> Choice:
        """The choice with the least cost that takes no more than a limit, or the least that there is."""

        def rank(choice: Choice) -> tuple[float, ...]:
            return max(0, takes(choice) - limit), *cost(choice)

        found, asked = [*[self.step.plain] * self.step.may_be_plain, self.known], limit
        for _ in range(ATTEMPTS):
            try:
                found.append(search(asked, rank))
            except SolveError:
                found.append(self._of_goal(LEAST_PEAK, rank))
                break
            if takes(found[-1]) <= limit:
                break
            asked -= takes(found[-1]) - limit
        return min(found, key=rank)

    def _within_bytes(self, budget: float, rank: Rank) -> Choice:
        if budget < 1:
            raise SolveError("")
        return self._of_goal(Goal(int(budget)), rank)

    def _within_seconds(self, fair: float | None, seconds: float, rank: Rank) -> Choice:
        """A plan within so many seconds; where these are what is ``fair``, the one that is taken without a goal."""
        goal = FAIR if seconds == fair else Goal(max_overhead=max(0.0, seconds / self.graph.step_seconds))
        return self._of_goal(goal, rank)

    def _of_goal(self, goal: Goal, rank: Rank) -> Choice:
        return self._of_calls(self.solving.plan(self.graph, goal), rank)

    @cached_property
    def graph(self) -> Graph:
        """The joined graph with what is outside of parts; backwards inside the forward count as those behind it."""
        step, usual = self.step, usual_events(len(self.step.calls))
        sizes = (most for _, most in step.sizes(self.known, usual))
        known = dict(zip((event.key for event in usual), sizes, strict=True))
        weights: dict[Key, int] = {}
        for event, (_, most) in zip(step.events, step.sizes(self.known), strict=True):
            weights[event.key] = max(weights.get(event.key, 0), event.outside + most - known[event.key])
        return step.graph(weights)

    def _of_calls(self, plan: Plan, rank: Rank) -> Choice:
        """A plan of the joined graph as one of each part: of its calls' plans the one with which the whole is best.

        Where that differs from call to call, or derivatives of gradients hold what is recomputed, the part may get the
        plan that is known, too, or none.
        """
        step = self.step
        found: list[list[Plan]] = [[] for _ in step.parts]
        for n, part in enumerate(step.calls):
            _add(found[part], step.plan_of_call(n, plan.decisions, plan.solver))
        first = tuple(plans[0] for plans in found)
        doubtful = {part for n, part in enumerate(step.calls) if step.saved_again[n] or len(found[part]) > 1}
        for part in doubtful:
            for other in (self.known[part], step.plain[part])[: 1 + step.parts[part].may_be_plain]:
                _add(found[part], other)
        starts = (first, step.plain)[: 1 + (bool(doubtful) and step.may_be_plain)]
        return min((self._descent(start, found, rank) for start in starts), key=rank)

    def _descent(self, choice: Choice, plans: Sequence[Sequence[Plan]], rank: Rank) -> Choice:
        """The choice after the best plan is taken for one part after the other."""
        for part, of_part in enumerate(plans):
            if len(of_part) > 1:
                choice = min(((*choice[:part], one, *choice[part + 1 :]) for one in of_part), key=rank)
        return choice


def _add(plans: list[Plan], plan: Plan) -> None:
    if all(plan.decisions != known.decisions for known in plans):
        plans.append(plan)

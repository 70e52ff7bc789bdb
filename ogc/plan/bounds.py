"""What no plan of a graph can beat: least bytes for a time, least time for bytes, by linear programs. Needs scipy.

A plan is looked at before the backwards of a few operations, its *moments*, of which the first comes first in the
backward. Variables from 0 to 1, for the moments k, the operations u and the tensors i that a plan may hold:

    held[k, i]      how much of i is there at moment k
    again[a, b, u]  whether u is recomputed between moments a and b: neighbours, one and the end, or at last any two
    low[u]          whether u runs as its low-memory variant: 0 or 1
    supplied[u]     whether a recomputation supplies what u saved, for which the runtime takes time

Minimise the seconds of what is recomputed between each moment and the next, or the peak within such a time, such that

    1 <= held[k, i]                               for what the backward of moment k saved
    1 <= held[a, i] + again[a, b, maker of i]     for what a backward between a and b saved
    held[b, i] <= held[a, i] + again[a, b, maker of i]
    again[a, b, u] <= held[a, i] + again[a, b, maker of i]     for each i that u reads
    again[a, b, u] <= again[a, a+1, u] + again[a+1, b, u]
    1 <= held[k, i] + supplied[u]                 for what u saved, if its backward comes after moment k
    sum of bytes[i] held[k, i] + bytes beside <= peak           at each moment k

Every plan gives a solution, and so does every schedule that recomputes any value at any time; so no plan is better than
the optimum. What the program leaves out: the memory between moments and of each recomputation, how often and in which
order operations are recomputed in between. Moments are added where the solution found so far would take more than it
may, until there is none.

The relaxation is that of Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization",
MLSys 2020, at a few moments in the place of all. Its weakness is mended by periods of any length: without them, half of
a tensor that is held serves to recompute half of another one in each period anew.

Raises:
    DependencyError: scipy is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import DependencyError
from ..graph import MIB, Graph
from .decisions import Decisions
from .simulate import lower_bound, plain_peak, simulate

try:
    from scipy.optimize import Bounds as Box
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import coo_array
except ImportError as error:
    raise DependencyError("bounds need scipy, which is not installed: pip install scipy") from error

ROUNDS = 12
"""Most programs that are solved, each with a moment more than the one before; three to ten are the rule."""

MANY, LARGE, APART = 7, 3_000, 30
"""Moments and variables, about, of the program with a plan's peaks, and how many parts of a program these are in."""

SMALL = 1e-5
"""Tensors of at most this share of the plain peak are taken to be there always."""

SETTLED = 1 + 1e-4
"""Times what is allowed, from which a moment is worth being looked at."""

CLOSE, NODES = 1e-3, 1000
"""Share by which the bound may be below the optimum of a program, and the most nodes of its search for variants."""

ERROR = 1e-6
"""What is taken off a bound for the solver's tolerances, which are of this size, in plain peaks or steps."""

EXACT = 1e-5
"""Share of bytes or time below which a difference is one of rounding."""

Row = list[tuple[float, int]]
"""Coefficients of variables."""


class Bounds:
    """What holds of all plans of a graph: those of :func:`ogc.make_plan` and the plain one.

    Args:
        graph: the weighted graph.
        plan: memory is looked at where this one peaks, too, so that its own gap becomes small.
    """

    def __init__(self, graph: Graph, plan: Decisions | None = None) -> None:
        self.graph, self.plain_peak = graph, plain_peak(graph)
        self.peaks = [] if plan is None else _peaks(graph, plan)

    @cached_property
    def _tensors(self) -> _Tensors:
        return _Tensors(self.graph)

    def least_bytes(self, seconds: float = math.inf) -> int:
        """Bytes below which no plan peaks that adds at most so many seconds to the plain step."""
        found = 0.0 if math.isinf(seconds) or not len(self.graph) else self._bound(None, seconds) * self._tensors.unit
        least = max(lower_bound(self.graph), math.ceil(max(0.0, found)))
        return min(least, self.plain_peak) if self.graph.runtime.choice <= seconds else least

    def least_seconds(self, budget: int) -> float:
        """Seconds that each plan adds at least whose peak is within a budget in bytes; infinite if there is none."""
        if self.plain_peak <= budget:
            return self.graph.runtime.choice
        if budget < lower_bound(self.graph):
            return math.inf
        return self._bound(budget, None) * (self.graph.step_seconds or 1.0)

    def _bound(self, budget: int | None, seconds: float | None) -> float:
        """The least peak in units or, with a budget, the least time in steps; infinite if there is none."""
        tensors, moments, best, whole = self._tensors, [len(self.graph) - 1], -math.inf, False
        for _ in range(ROUNDS):
            program = _Relaxation(tensors, moments, budget, seconds)
            best = max(best, program.solve(whole))
            if program.solution is None:
                return best
            alive = program.least_alive()
            worst = int(np.argmax(alive))
            if worst not in moments and alive[worst] > (best if budget is None else budget / tensors.unit) * SETTLED:
                moments.append(worst)
            elif whole or not program.low:
                break
            else:
                whole = True
        many = min(MANY, math.isqrt(4 * LARGE // len(self.graph)))  # as there are periods between any two
        further = dict.fromkeys([*moments, *self.peaks][:many])
        return max(best, _Relaxation(tensors, further, budget, seconds, any_two=True).solve(False))


def _peaks(graph: Graph, plan: Decisions) -> list[int]:
    """The backwards in which a plan peaks, the highest first, some way from one another."""
    alive: dict[int, int] = {}
    for event in simulate(graph, plan).timeline:
        if event.phase == "backward":
            alive[event.operation] = max(event.bytes, alive.get(event.operation, 0))
    found: list[int] = []
    for t in sorted(alive, key=lambda t: -alive[t]):
        if all(abs(t - other) > len(graph) // APART for other in found):
            found.append(t)
    return found


@dataclass(frozen=True)
class Gap:
    """How far a plan may be from the best one, by what is proven of all plans.

    Attributes:
        peak_bytes, added_seconds: of the plan.
        least_bytes: no plan that adds as little time, or as little as was asked for, peaks lower.
        least_seconds: no plan that peaks as low, or within the budget that was asked for, adds less.
        step_seconds: of the plain step.
    """

    peak_bytes: int
    added_seconds: float
    least_bytes: int
    least_seconds: float
    step_seconds: float

    @property
    def bytes(self) -> float:
        """How far the peak may be above the least, as a share of that."""
        return max(0.0, self.peak_bytes / self.least_bytes - 1) if self.least_bytes else 0.0

    @property
    def time(self) -> float:
        """How much longer than the shortest the step may be, as a share of that."""
        least = self.step_seconds + self.least_seconds
        return max(0.0, (self.step_seconds + self.added_seconds) / least - 1) if least > 0 else 0.0

    @property
    def overhead(self) -> float:
        """How far the added time may be above the least, as a share of that."""
        if self.time <= EXACT:
            return 0.0
        return self.added_seconds / self.least_seconds - 1 if self.least_seconds > 0 else math.inf

    def __str__(self) -> str:
        step = self.step_seconds or 1.0
        return (
            f"peak {self.peak_bytes / MIB:.1f} MiB, {_words(self.bytes)} (no plan as fast below "
            f"{self.least_bytes / MIB:.1f}); time {self.added_seconds / step:+.1%}, {_words(self.time)} (no plan as "
            f"small below {self.least_seconds / step:+.1%})"
        )


def _words(gap: float) -> str:
    return "optimal" if gap <= EXACT else f"within {math.ceil(1000 * gap) / 1000:.1%} of the optimum"


Need = tuple[int, float, float]
"""A tensor that a backward needs, how much with PyTorch's own operator, and how much more with the low-memory one."""


class _Tensors:
    """What plans of a graph may hold: results of operations as each write leaves them, and internal tensors.

    Attributes:
        unit: plain peak in bytes, in which bytes are counted.
        bytes, makers: by tensor.
        made, read, needs: of each operation, the tensors that it makes, those it reads, and its backward's needs.
        kept: of each operation, the bytes of internal tensors that every plan keeps, by variant.
        backward: of each operation, the bytes that its backward takes beside, by variant.
        can_repeat: for each operation, whether a plan may recompute it.
        seconds: of each operation's recomputation, at least.
        low_seconds: what each low-memory variant adds.
        fixed_seconds: what every plan adds.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.unit = graph, max(1, plain_peak(graph))
        self.variants = graph.with_variants(()), graph.with_variants(graph.low_memory)
        own, low = (each.operations for each in self.variants)
        self.bytes: list[int] = []
        self.makers: list[int] = []
        self.made: list[list[int]] = [[] for _ in own]
        self.read: list[list[int]] = []
        self.needs: list[list[Need]] = []
        self.kept: list[tuple[int, int]] = []
        self._useful: dict[int, frozenset[int]] = {}
        latest: dict[int, int] = {}
        for t in range(len(graph)):
            self._add_operation(t, latest)
        outputs = [latest[v] for v, value in enumerate(graph.values) if value.is_output]
        self.output_bytes = sum(self.bytes[i] for i in outputs)
        self.is_there = [size <= SMALL * self.unit for size in self.bytes]
        for i in outputs:
            self.is_there[i] = True
        self.backward = [(a.backward_bytes, b.backward_bytes) for a, b in zip(own, low, strict=True)]
        self.can_repeat = [op.replayable and t < graph.end for t, op in enumerate(own)]
        self.seconds = list(map(min, *(each.repeat_seconds for each in self.variants)))
        self.low_seconds = {
            t: graph.operations[t].variant_seconds + low[t].again_seconds - own[t].again_seconds
            for t in graph.low_memory
        }
        again = sum(op.again_seconds for op in own)
        self.fixed_seconds = again + graph.runtime.choice - graph.runtime.left_out

    def _add_operation(self, t: int, latest: dict[int, int]) -> None:
        both = tuple(each.operations[t] for each in self.variants)
        self.read.append(sorted({latest[v] for v in both[0].reads}))
        for v in dict.fromkeys(both[0].writes):
            latest[v] = self._tensor(self.graph.values[v].bytes, t)
        saves = [{latest[v] for v in op.saves} for op in both]
        kept = [0, 0]
        is_one = self.graph.operations[t].low_memory is None
        for which, op in enumerate(both):
            if self.variants[which].keeps_internals[t]:
                kept[which] = op.internal_bytes
            elif op.internal_bytes and not (which and is_one):
                saves[which].add(self._tensor(op.internal_bytes, t))
        if is_one:
            saves[1] = saves[0]
        self.needs.append(
            [(i, float(i in saves[0]), float(i in saves[1]) - (i in saves[0])) for i in sorted(saves[0] | saves[1])]
        )
        self.kept.append((kept[0], kept[1]))

    def _tensor(self, size: int, t: int) -> int:
        self.bytes.append(size)
        self.makers.append(t)
        self.made[t].append(len(self.makers) - 1)
        return len(self.makers) - 1

    def useful(self, stop: int) -> frozenset[int]:
        """The tensors that backwards of operations before ``stop`` need, themselves or to make what they need."""
        if stop in self._useful:
            return self._useful[stop]
        wanted: set[int] = set()
        for t in range(stop - 1, -1, -1):
            wanted.update(i for i, *_ in self.needs[t] if not self.is_there[i])
            if self.can_repeat[t] and not wanted.isdisjoint(self.made[t]):
                wanted.update(i for i in self.read[t] if not self.is_there[i])
        self._useful[stop] = frozenset(wanted)
        return self._useful[stop]

    def repeated(self, stop: int) -> list[int]:
        """The operations whose recomputation is of use to backwards of operations before ``stop``."""
        useful = self.useful(stop)
        return [
            t for t in range(min(stop, self.graph.end)) if self.can_repeat[t] and not useful.isdisjoint(self.made[t])
        ]


class _Relaxation:
    """The linear program at given moments, in units of the plain peak and of the plain step."""

    def __init__(
        self,
        tensors: _Tensors,
        moments: Iterable[int],
        budget: int | None,
        seconds: float | None,
        any_two: bool = False,
    ) -> None:
        self.tensors, self.moments, self.any_two = tensors, sorted(moments, reverse=True), any_two
        moments = self.moments
        self.unit, self.step = tensors.unit, tensors.graph.step_seconds or 1.0
        self.count = 0
        self.rows: list[Row] = []
        self.most: list[float] = []  # of each row
        self.low = dict(zip(tensors.graph.low_memory, self._variables(len(tensors.graph.low_memory)), strict=True))
        self.held: list[dict[int, int]] = [self._named(i for i in tensors.useful(t + 1)) for t in moments] + [{}]
        self.cost: Row = [(more / self.step, self.low[t]) for t, more in tensors.low_seconds.items()]
        self.again: dict[tuple[int, int], dict[int, int]] = {}
        for place in reversed(range(len(moments))):
            self._add_time(place)
        self._add_supplied()
        self.peak = next(self._variables(1)) if budget is None else None
        for place in range(len(moments)):
            self._add_memory(place, None if budget is None else budget / self.unit)
        if seconds is not None:
            self._at_most((seconds - tensors.fixed_seconds) / self.step + ERROR, self.cost)

    def _variables(self, count: int) -> Iterator[int]:
        self.count += count
        return iter(range(self.count - count, self.count))

    def _named(self, keys: Iterable[int]) -> dict[int, int]:
        """A variable for each key."""
        keys = sorted(keys)
        return dict(zip(keys, self._variables(len(keys)), strict=True))

    def _at_most(self, most: float, row: Row) -> None:
        self.rows.append(row)
        self.most.append(most)

    def _add_time(self, place: int) -> None:
        """What is recomputed from a moment to the next and to the end, or to each later one."""
        tensors, first, last = self.tensors, self.moments[place], len(self.moments)
        for following in range(place + 1, last + 1) if self.any_two else sorted({place + 1, last}):
            self.again[place, following] = again = self._named(tensors.repeated(first))
            stop = self.moments[following] if following < last else -1
            self._add_period(place, again, range(stop + 1, first), following)
            if following == place + 1:
                self.cost += [(tensors.seconds[t] / self.step, x) for t, x in again.items()]
                continue
            for t, x in again.items():
                parts = self.again[place, place + 1].get(t), self.again[place + 1, following].get(t)
                self._at_most(0.0, [(1.0, x), *((-1.0, part) for part in parts if part is not None)])

    def _add_period(self, place: int, again: dict[int, int], backwards: Iterable[int], following: int) -> None:
        """What is recomputed between two moments, the backwards between them, and what is held at the second."""
        tensors, held = self.tensors, self.held[place]

        def there(i: int) -> Row:
            found = (held.get(i), again.get(tensors.makers[i]))
            return [(-1.0, x) for x in found if x is not None]

        for t in backwards:
            for i, own, more in tensors.needs[t]:
                if not tensors.is_there[i]:
                    self._at_most(-own, self._if_low(t, more) + there(i))
        for i, x in self.held[following].items():
            self._at_most(0.0, [(1.0, x), *there(i)])
        for t, x in again.items():
            for i in tensors.read[t]:
                if not tensors.is_there[i]:
                    self._at_most(0.0, [(1.0, x), *there(i)])

    def _add_supplied(self) -> None:
        """What the runtime takes for saved tensors that a recomputation supplies: those of which some is not held."""
        tensors, graph = self.tensors, self.tensors.graph
        weights = [graph.runtime.saved_tensor * op.saved_tensors for op in graph.operations[: graph.end]]
        supplied = self._named(t for t, weight in enumerate(weights) if weight)
        self.cost += [(weights[t] / self.step, x) for t, x in supplied.items()]
        for t, x in supplied.items():
            for place, moment in enumerate(self.moments):
                for i, own, more in tensors.needs[t] if t <= moment else ():
                    if not tensors.is_there[i]:
                        self._at_most(-own, [*self._if_low(t, more), (-1.0, self.held[place][i]), (-1.0, x)])

    def _if_low(self, t: int, more: float) -> Row:
        return [(more, self.low[t])] if more else []

    def _add_memory(self, place: int, budget: float | None) -> None:
        """What the backward of a moment needs is there, and fits."""
        tensors, held, t = self.tensors, self.held[place], self.moments[place]
        for i, own, more in tensors.needs[t]:
            if not tensors.is_there[i]:
                self._at_most(-own, [*self._if_low(t, more), (-1.0, held[i])])
        row = [(tensors.bytes[i] / self.unit, x) for i, x in held.items()]
        fixed = tensors.output_bytes
        for which, (own_bytes, low_bytes) in [*enumerate(tensors.kept[: t + 1]), (t, tensors.backward[t])]:
            fixed += own_bytes
            if low_bytes != own_bytes:
                row.append(((low_bytes - own_bytes) / self.unit, self.low[which]))
        if self.peak is not None:
            row.append((-1.0, self.peak))
        self._at_most((0.0 if budget is None else budget + ERROR) - fixed / self.unit, row)

    def solve(self, whole: bool) -> float:
        """The bound; infinite where there is no solution. Operations run as a share of a variant, unless ``whole``."""
        goal, high, kinds = np.zeros(self.count), np.ones(self.count), np.zeros(self.count)
        if self.peak is None:
            np.add.at(goal, [x for _, x in self.cost], [weight for weight, _ in self.cost])
        else:
            goal[self.peak], high[self.peak] = 1.0, np.inf
        kinds[list(self.low.values())] = whole
        lengths = [len(row) for row in self.rows]
        weights, columns = zip(*(entry for row in self.rows for entry in row), strict=True)
        places = (np.repeat(np.arange(len(lengths)), lengths), columns)
        matrix = coo_array((weights, places), shape=(len(lengths), self.count)).tocsr()
        found = milp(
            goal,
            integrality=kinds,
            bounds=Box(0.0, high),
            constraints=LinearConstraint(matrix, -np.inf, self.most),
            options={"mip_rel_gap": CLOSE, "node_limit": NODES},
        )
        self.solution = found.x
        if found.status == 2:
            return math.inf
        if not kinds.any():  # a linear program: the optimum is the bound
            found.mip_dual_bound = found.fun if found.status == 0 else None
        bound = -math.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)
        fixed = self.tensors.fixed_seconds / self.step if self.peak is None else 0.0
        return bound - ERROR * (1 + abs(bound)) + fixed

    def least_alive(self) -> NDArray[np.float64]:
        """For each backward, the least bytes in units with which the recomputations of this solution would do.

        What is not recomputed up to the end is there until the last backward that needs it.
        """
        tensors, value = self.tensors, self.solution
        again = np.zeros(len(tensors.graph))
        for place in range(len(self.moments)):
            for t, x in self.again[place, len(self.moments)].items():
                again[t] = max(again[t], value[x])
        alive, stays, there = np.zeros(len(tensors.graph)), float(tensors.output_bytes), dict[int, float]()
        for t, needs in enumerate(tensors.needs):
            low = value[self.low[t]] if t in self.low else 0.0
            kept, beside = (own + low * (other - own) for own, other in (tensors.kept[t], tensors.backward[t]))
            stays += kept
            alive[t] = stays + beside
            for i, own, more in needs:
                if tensors.is_there[i]:
                    continue
                wanted, before = own + low * more, there.get(i, 0.0)
                alive[t] += tensors.bytes[i] * max(0.0, wanted - before)
                there[i] = max(before, wanted - again[tensors.makers[i]])
                stays += tensors.bytes[i] * (there[i] - before)
        return alive / self.unit

"""The exact oracle: the best of all recomputation schedules of a small graph, by constraint programming (CP-SAT).

A schedule runs every operation forward once, in program order, then backward once, in reverse. In between any
replayable operation may be run *again*, and whatever is held may be dropped. What can be held is an *item*: a
value with the content that one write gave it, or the internal tensors of an operation. The program offers all
operations so far again, in program order, ``passes`` times before each step of the forward and backward.

Variables, all binary, for the steps n that are offered and the items i:

    taken[n]        whether step n is taken: 1 for what is no run again
    held[n, i]      whether item i is held before step n; one variable from a step that touches i to the next

Minimise the peak, or the time of what runs again with a given peak, such that

    held[0, i] = 0, and held[n+1, i] <= held[n, i] + (taken[n] if step n makes i)
    taken[n] <= held[n, i]                    for each i that step n needs
    taken[n] + held[n+1, i] <= 1              for each i that step n changes in place
    held[n, i] = 1                            for each i that stays whatever the schedule, while it does
    sum of bytes[i] held[n, i] + bytes beside[n] taken[n] <= peak

with the bytes beside what is held (results, scratch, gradients) as :mod:`ogc.plan.simulate` counts them, and
n+1 for n where something is let go of within the step. What stays are outputs, what the caller holds until the
backward, and internal tensors that every plan keeps.

This follows Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization", MLSys 2020,
section 4, whose R is ``taken`` and whose S is ``held``. There an operation's stage is a pass over all before it, and
one pass is too few: in a residual block the optimum makes some value twice before one backward.

Not among the schedules: other orders of the first runs and of the backwards, two copies of one item, more than
``passes`` passes in one place. A plan that needs no more passes is no better than the best schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from ogc.graph import Graph
from ogc.plan.decisions import Decided, Decisions, Segment
from ogc.plan.schedule import FORWARD, Schedule

Items = frozenset[int]


class Step(NamedTuple):
    """An operation run ``"forward"``, run ``"again"`` while gradients wait, or run ``"backward"``."""

    phase: str
    operation: int
    gradient_bytes: int = 0


class Move(NamedTuple):
    """What an operation does to the items."""

    needs: Items
    makes: Items
    changes: Items  # needed, and gone once it ran
    takes: Items  # needed, and part of the results unless it is held any longer
    saves: Items  # needed by its backward
    internal: Items  # of these, what stays until the backward is done
    new_bytes: int  # allocated while it runs, even if another copy is there


class Ledger:
    """The items of a graph: their bytes, and what each operation does to them.

    Attributes:
        begins, ends: for a forward or backward, the items that stay from then on whatever the schedule, or no longer.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bytes: list[int] = []
        latest: dict[int, int] = {}  # for each value, the item with its content so far
        self.moves = tuple(self._move(t, latest) for t in range(len(graph)))
        self.begins: dict[tuple[str, int], set[int]] = {}
        self.ends: dict[tuple[str, int], set[int]] = {}
        for v, value in enumerate(graph.values):
            if value.is_output or value.is_returned:
                self._stays(latest[v], graph.last_writes[v], None if value.is_output else ("forward", len(graph) - 1))
        for t, move in enumerate(self.moves):
            for item in move.internal if graph.keeps_internals[t] else ():
                self._stays(item, t, ("backward", t))

    def _stays(self, item: int, t: int, until: tuple[str, int] | None) -> None:
        self.begins.setdefault(("forward", t), set()).add(item)
        if until is not None:
            self.ends.setdefault(until, set()).add(item)

    def _move(self, t: int, latest: dict[int, int]) -> Move:
        op, values = self.graph.operations[t], self.graph.values
        needs = {v: latest[v] for v in op.reads}
        made = {v: self._item(values[v].bytes) for v in dict.fromkeys(op.writes)}
        internal = frozenset([self._item(op.internal_bytes)] if op.internal_bytes else [])
        latest.update(made)
        return Move(
            needs=frozenset(needs.values()),
            makes=internal.union(made.values()),
            changes=frozenset(item for v, item in needs.items() if v in made),
            takes=frozenset(item for v, item in needs.items() if v == op.takes_over),
            saves=internal.union(latest[v] for v in op.saves),
            internal=internal,
            new_bytes=op.internal_bytes + sum(values[v].bytes for v in made if v not in needs),
        )

    def _item(self, size: int) -> int:
        self.bytes.append(size)
        return len(self.bytes) - 1

    def staying(self, steps: Iterable[Step]) -> Iterator[Items]:
        """After each step, the items that stay whatever the schedule."""
        now: set[int] = set()
        for step in steps:
            now |= self.begins.get(step[:2], set())
            now -= self.ends.get(step[:2], set())
            yield frozenset(now)

    def moments(self, step: Step) -> Iterator[tuple[int, Items]]:
        """When a step may peak: the bytes beside what is held, and the items that it may have let go of."""
        op, move = self.graph.operations[step.operation], self.moves[step.operation]
        if step.phase != "backward":
            yield move.new_bytes + op.scratch_bytes + step.gradient_bytes, move.takes
            return
        yield op.backward_bytes, frozenset()
        if op.late_bytes:
            yield op.late_bytes, frozenset(range(len(self.bytes))) - move.internal

    def asked(self, operations: Iterable[int], items: Items) -> Items:
        """These items, and all that some of these operations, the last first, would need to make them."""
        wanted = set(items)
        for t in operations:
            if not wanted.isdisjoint(self.moves[t].makes):
                wanted |= self.moves[t].needs
        return frozenset(wanted)


def offered(graph: Graph, passes: int, in_forward: bool) -> Iterator[Step]:
    """All steps that a schedule may have, in order; the runs again are optional, and make what may be of use."""
    ledger = Ledger(graph)
    can_run = [t for t in reversed(range(graph.end)) if graph.operations[t].replayable]
    saved: list[Items] = [frozenset()]  # by operations so far
    for move in ledger.moves:
        saved.append(saved[-1] | move.saves)

    def again(useful: Items, stop: int, gradient_bytes: int = 0) -> list[Step]:
        before = [t for t in can_run if t < stop]
        asked = ledger.asked(before, useful)
        found = [t for t in reversed(before) if not asked.isdisjoint(ledger.moves[t].makes)]
        return passes * [Step("again", t, gradient_bytes) for t in found]

    later = frozenset().union(*(move.needs for move in ledger.moves))
    for t in range(len(graph)):
        if in_forward:
            yield from again(later | saved[-1], t)
        yield Step("forward", t)
    for t in reversed(range(len(graph))):
        yield from again(saved[t + 1], t + 1, graph.operations[t].gradient_bytes)
        yield Step("backward", t)


def steps_of(graph: Graph, plan: Decided | Decisions | Iterable[Segment]) -> Iterator[Step]:
    """The steps of a plan."""
    for step in Schedule(graph, Decisions.of(plan)).steps:
        phase = "backward" if step.is_backward else "forward" if step.run == FORWARD else "again"
        yield Step(phase, step.operation, 0 if step.during is None else graph.operations[step.during].gradient_bytes)


def replay(graph: Graph, steps: Iterable[Step]) -> int:
    """Peak in bytes of a schedule that holds no more than it must.

    Raises:
        ValueError: an item is needed that is not there.
    """
    ledger, steps = Ledger(graph), list(steps)
    staying = [frozenset[int](), *ledger.staying(steps)]
    after = staying[-1]
    peak = 0
    for number, step in reversed(list(enumerate(steps))):
        move = ledger.moves[step.operation]
        if step.phase == "backward":
            before = after | move.saves
        elif move.changes & after:
            raise ValueError(f"operation {step.operation} changes in place what is needed afterwards")
        else:
            before = (after - move.makes) | move.needs
        before |= staying[number]
        for beside, let_go in ledger.moments(step):
            peak = max(peak, beside + sum(ledger.bytes[i] for i in (before - let_go) | (after & let_go)))
        after = before
    if after:
        raise ValueError("something is needed before any step makes it")
    return peak


def seconds_of(graph: Graph, steps: Iterable[Step]) -> float:
    """The time of what a schedule runs again."""
    again = sum(graph.repeat_seconds[step.operation] for step in steps if step.phase == "again")
    return again + sum(op.again_seconds for op in graph.operations)


class Best(NamedTuple):
    """The best schedule that was found, and what no schedule is below: the same where it is proven to be the best."""

    steps: tuple[Step, ...]
    found: float
    bound: float


def least_peak(graph: Graph, *, passes: int = 2, in_forward: bool = True) -> int:
    """The least peak in bytes of all schedules.

    Args:
        graph: the weighted graph.
        passes: how often the operations are gone through before each step.
        in_forward: whether operations may be run again for the forward, too, rather than for the backward alone.
    """
    best = best_schedule(graph, passes=passes, in_forward=in_forward)
    assert best.found == best.bound, "the bound proves the schedule to be the best"
    return int(best.found)


def least_seconds(graph: Graph, budget: int, *, passes: int = 2, in_forward: bool = True) -> float | None:
    """The least time that any schedule recomputes whose peak is within ``budget`` bytes; None where none is."""
    best = best_schedule(graph, budget, passes=passes, in_forward=in_forward)
    assert best is None or abs(best.found - best.bound) <= 1e-6 * max(1.0, best.found)
    return best and best.found


def best_schedule(
    graph: Graph,
    budget: int | None = None,
    *,
    passes: int = 2,
    in_forward: bool = True,
    start: Sequence[Step] = (),
    limit: float = 600.0,
    workers: int = 1,
) -> Best | None:
    """The schedule with the least peak or, with a budget in bytes, with the least recomputed time.

    Args:
        graph, budget, passes, in_forward: as above.
        start: a schedule that is known.
        limit: seconds after which the best so far is taken.
        workers: threads.

    Returns:
        The schedule, and its peak in bytes or its seconds; None where none keeps the budget.
    """
    program = _Program(graph, list(offered(graph, passes, in_forward)), budget)
    program.hint(start)
    return program.solve(limit, workers)


def following(graph: Graph, steps: Sequence[Step]) -> Best:
    """A schedule as the program has it: the least that it holds."""
    program = _Program(graph, list(steps), takes_all=True)
    found = program.solve(600.0, 1)
    assert found is not None
    return found


def placed(steps: Sequence[Step], start: Sequence[Step]) -> list[int] | None:
    """The numbers of the steps on offer that a schedule takes; None where it would take more passes."""
    places, n = [], 0
    for step in start:
        while n < len(steps) and steps[n] != step:
            if steps[n].phase != "again":
                return None
            n += 1
        places.append(n)
        n += 1
    return places


class _Program:
    """The constraint program; bytes are in units of what divides them all."""

    def __init__(self, graph: Graph, steps: list[Step], budget: int | None = None, takes_all: bool = False) -> None:
        self.graph, self.steps, self.ledger, self.budget = graph, steps, Ledger(graph), budget
        self.takes_all = takes_all
        every = [size for step in steps for size, _ in self.ledger.moments(step)]
        self.unit = max(1, gcd(*self.ledger.bytes, *every))
        self.model = cp_model.CpModel()
        most = sum(self.ledger.bytes) + max(every, default=0)
        self.peak = self.model.new_int_var(0, (most if budget is None else min(most, budget)) // self.unit, "peak")
        self.taken: list[Any] = []
        self.held: list[Any] = [0] * len(self.ledger.bytes)
        staying = list(self.ledger.staying(steps))
        last = {i: n for n, step in enumerate(steps) for i in self._needs(step)}
        for n, step in enumerate(steps):
            self._add_step(step, {i for i, end in last.items() if end > n}, staying[n])
        self._aim()

    def _needs(self, step: Step) -> Items:
        move = self.ledger.moves[step.operation]
        return move.saves if step.phase == "backward" else move.needs

    def _add_step(self, step: Step, useful: set[int], staying: Items) -> None:
        model, move = self.model, self.ledger.moves[step.operation]
        taken = model.new_bool_var("") if step.phase == "again" and not self.takes_all else 1
        makes = frozenset[int]() if step.phase == "backward" else move.makes
        self.taken.append(taken)
        for i in self._needs(step):
            model.add(self.held[i] >= taken)
        before, after = self.held, list(self.held)
        for i in self._needs(step) | makes | staying:
            if i in staying:
                after[i] = 1
            elif i not in useful:
                after[i] = 0
            else:
                after[i] = held = model.new_bool_var("")
                model.add(held <= before[i] + (taken if i in makes else 0))
                if step.phase != "backward" and i in move.changes:
                    model.add(held + taken <= 1)
        for i in range(len(after)):
            if i not in useful and i not in staying:
                after[i] = 0
        if step.phase == "again" and not self.takes_all:  # for something, as what is for nothing only costs
            model.add(taken <= sum(after[i] for i in makes))
        for beside, let_go in self.ledger.moments(step):
            alive = ((after if i in let_go else before)[i] * size for i, size in self._sizes())
            model.add(sum(alive) + taken * (beside // self.unit) <= self.peak)
        self.held = after

    def _sizes(self) -> Iterator[tuple[int, int]]:
        return ((i, size // self.unit) for i, size in enumerate(self.ledger.bytes) if size)

    def _aim(self) -> None:
        if self.budget is None:
            self.model.minimize(self.peak)
            return
        seconds = self.graph.repeat_seconds
        self.scale = 1e6 / max([*seconds, 1e-30])
        self.model.minimize(
            sum(
                round(seconds[step.operation] * self.scale) * taken
                for step, taken in zip(self.steps, self.taken, strict=True)
                if step.phase == "again"
            )
        )

    def hint(self, start: Sequence[Step]) -> None:
        """Begin with a schedule that is known."""
        places = placed(self.steps, start) if start else None
        for n, taken in enumerate(self.taken if places is not None else ()):
            if self.steps[n].phase == "again":
                self.model.add_hint(taken, n in set(places or ()))

    def solve(self, limit: float, workers: int) -> Best | None:
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds, solver.parameters.num_workers = limit, workers
        solver.parameters.linearization_level = 2  # its bounds are far better here
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return None
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), f"no schedule within {limit} s"
        steps = tuple(s for s, taken in zip(self.steps, self.taken, strict=True) if solver.value(taken))
        peak, bound = replay(self.graph, steps), solver.best_objective_bound
        if self.budget is None:
            return Best(steps, peak, min(peak, round(bound) * self.unit))
        assert peak <= self.budget
        seconds = seconds_of(self.graph, steps)
        fixed = sum(op.again_seconds for op in self.graph.operations)
        return Best(steps, seconds, seconds if status == cp_model.OPTIMAL else bound / self.scale + fixed)

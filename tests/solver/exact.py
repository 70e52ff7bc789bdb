"""The exact oracle: the least peak of all recomputation schedules of a small graph, as a mixed-integer program.

A schedule runs every operation forward once, in program order, then backward once, in reverse. In between any
replayable operation may be run *again*, and whatever is held may be dropped. What can be held is an *item*: a
value with the content that one write gave it, or the internal tensors of an operation. The program offers all
operations so far again, in program order, ``passes`` times before each step of the forward and backward.

Variables, for the steps n that are offered and the items i:

    peak            in bytes
    taken[n]        whether step n is taken: binary, and 1 for what is no run again
    held[n, i]      how much of item i is held before step n, from 0 to 1

Minimise ``peak`` such that

    held[0, i] = 0, and held[n+1, i] <= held[n, i] + (taken[n] if step n makes i)
    taken[n] <= held[n, i]                    for each i that step n needs
    taken[n] + held[n+1, i] <= 1              for each i that step n changes in place
    held[n, i] = 1                            for each output i, from its making on
    sum of bytes[i] held[n, i] + bytes beside[n] taken[n] <= peak

with the bytes beside what is held (results, scratch, gradients) as :mod:`ogc.plan.simulate` counts them, and
n+1 for n where something is let go of within the step. Once ``taken`` is chosen, the least ``held`` that will
do is 0 or 1 by itself: leaving it continuous loses nothing.

This follows Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization", MLSys 2020,
section 4, whose R is ``taken`` and whose S is ``held``. There an operation's stage is a pass over all before it;
``held`` after each step, rather than once per stage, replaces their linearised products for deallocation.

Not among the schedules: other orders of the first runs and of the backwards, two copies of one item, more than
``passes`` passes in one place. The least peak is an upper bound for those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from ogc.graph import Graph
from ogc.plan.decisions import Decisions, Segment
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
    """The items of a graph: their bytes, what each operation does to them, and which are outputs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bytes: list[int] = []
        latest: dict[int, int] = {}  # for each value, the item with its content so far
        self.moves = tuple(self._move(t, latest) for t in range(len(graph)))
        self.outputs = {latest[v]: graph.last_writes[v] for v, value in enumerate(graph.values) if value.is_output}

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

    def moments(self, step: Step) -> Iterator[tuple[int, Items]]:
        """When a step may peak: the bytes beside what is held, and the items that it may have let go of."""
        op, move = self.graph.operations[step.operation], self.moves[step.operation]
        if step.phase != "backward":
            yield move.new_bytes + op.scratch_bytes + step.gradient_bytes, move.takes
            return
        yield op.backward_bytes, frozenset()
        if op.late_bytes:
            yield op.late_bytes, frozenset(range(len(self.bytes))) - move.internal


def offered(graph: Graph, passes: int, in_forward: bool) -> Iterator[Step]:
    """All steps that a schedule may have, in order; the runs again are optional."""

    def again(stop: int, gradient_bytes: int = 0) -> list[Step]:
        return passes * [Step("again", t, gradient_bytes) for t in range(stop) if graph.operations[t].replayable]

    for t in range(len(graph)):
        if in_forward:
            yield from again(t)
        yield Step("forward", t)
    for t in reversed(range(len(graph))):
        yield from again(t + 1, graph.operations[t].gradient_bytes)
        yield Step("backward", t)


def steps_of(graph: Graph, segments: Sequence[Segment]) -> Iterator[Step]:
    """The steps of a plan."""
    for step in Schedule(graph, Decisions.of(segments)).steps:
        phase = "backward" if step.is_backward else "forward" if step.run == FORWARD else "again"
        yield Step(phase, step.operation, 0 if step.during is None else graph.operations[step.during].gradient_bytes)


def replay(graph: Graph, steps: Iterable[Step]) -> int:
    """Peak in bytes of a schedule that holds no more than it must.

    Raises:
        ValueError: an item is needed that is not there.
    """
    ledger, steps = Ledger(graph), list(steps)
    after = frozenset(ledger.outputs)
    peak = 0
    for step in reversed(steps):
        move = ledger.moves[step.operation]
        if step.phase == "backward":
            before = after | move.saves
        elif move.changes & after:
            raise ValueError(f"operation {step.operation} changes in place what is needed afterwards")
        else:
            made = move.makes if step.phase == "forward" else move.makes - ledger.outputs.keys()
            before = (after - made) | move.needs
        for beside, let_go in ledger.moments(step):
            peak = max(peak, beside + sum(ledger.bytes[i] for i in (before - let_go) | (after & let_go)))
        after = before
    if after:
        raise ValueError("something is needed before any step makes it")
    return peak


def least_peak(graph: Graph, *, passes: int = 1, in_forward: bool = True) -> int:
    """The least peak in bytes of all schedules.

    Args:
        graph: the weighted graph.
        passes: how often the operations are gone through before each step.
        in_forward: whether operations may be run again for the forward, too, rather than for the backward alone.
    """
    return _Program(graph, list(offered(graph, passes, in_forward))).solve()


class _Program:
    """The mixed-integer program; its bytes are in units of the largest weight, for the tolerances' sake."""

    def __init__(self, graph: Graph, steps: list[Step]) -> None:
        self.graph, self.steps, self.ledger = graph, steps, Ledger(graph)
        self.unit = max(1, *self.ledger.bytes, *(op.backward_bytes for op in graph.operations))
        self.rows: list[dict[int, float]] = []  # column: weight
        self.most: list[float] = []  # for each row
        count = 1 + len(steps) + (len(steps) + 1) * len(self.ledger.bytes)
        self.low, self.high = np.zeros(count), np.ones(count)
        self.high[0] = np.inf
        self.high[self._held(0, 0) : self._held(1, 0)] = 0
        for n, step in enumerate(steps):
            self._add_step(n, step)
        for i, t in self.ledger.outputs.items():
            self.low[[self._held(n + 1, i) for n in range(steps.index(Step("forward", t)), len(steps))]] = 1

    def solve(self) -> int:
        goal, binary = np.zeros(len(self.low)), np.zeros(len(self.low))
        goal[0] = 1
        binary[self._taken(0) : self._taken(len(self.steps))] = 1
        entries = [(r, c, weight) for r, row in enumerate(self.rows) for c, weight in row.items()]
        rows, columns, weights = zip(*entries, strict=True)
        matrix = coo_array((weights, (rows, columns)), shape=(len(self.rows), len(goal))).tocsr()
        found = milp(
            goal,
            integrality=binary,
            bounds=Bounds(self.low, self.high),
            constraints=LinearConstraint(matrix, -np.inf, self.most),
            options={"mip_rel_gap": 0, "time_limit": 600},
        )
        assert found.status == 0, found.message
        peak = replay(self.graph, (step for n, step in enumerate(self.steps) if found.x[self._taken(n)] > 0.5))
        assert abs(peak - found.mip_dual_bound * self.unit) < 0.5, "the bound proves the schedule to be the best"
        return peak

    def _taken(self, n: int) -> int:
        return 1 + n

    def _held(self, n: int, item: int) -> int:
        return 1 + len(self.steps) + n * len(self.ledger.bytes) + item

    def _at_most(self, most: float, row: dict[int, float]) -> None:
        self.rows.append(row)
        self.most.append(most)

    def _add_step(self, n: int, step: Step) -> None:
        move, taken = self.ledger.moves[step.operation], self._taken(n)
        is_backward = step.phase == "backward"
        self.low[taken] = step.phase != "again"
        for i in range(len(self.ledger.bytes)):
            source = {taken: -1.0} if i in move.makes and not is_backward else {}
            self._at_most(0, {self._held(n + 1, i): 1, self._held(n, i): -1, **source})
        for i in move.saves if is_backward else move.needs:
            self._at_most(0, {taken: 1, self._held(n, i): -1})
        for i in frozenset() if is_backward else move.changes:
            self._at_most(1, {taken: 1, self._held(n + 1, i): 1})
        for beside, let_go in self.ledger.moments(step):
            alive = {self._held(n + (i in let_go), i): size / self.unit for i, size in enumerate(self.ledger.bytes)}
            self._at_most(0, {**alive, taken: beside / self.unit, 0: -1})

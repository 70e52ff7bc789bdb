"""From a graph and a goal to a plan: ``solve``, ``frontier``, and the solvers by name."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import InputError, SolveError
from ..graph import MIB, Graph
from ..plan import Frontier, Plan, Segment, plain_plan, simulate
from ..plan.fast import library
from ..process import collecting_new_only, is_late, shown
from .candidates import Candidate, front_of
from .goal import FAIR_OVERHEAD, LEAST_PEAK, NEGLIGIBLE, Budget, Goal, Solver, bytes_of
from .polish import Aim, polished
from .references import REFERENCES
from .search import fair, search_of


@collecting_new_only()
@shown()
def solve(
    graph: Graph,
    *,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    solver: str = "optimal",
    effort: int = 0,
) -> Plan:
    """The plan that is asked for; without a goal, the least peak that about one forward more can buy.

    That is: no operation runs more than twice, a step takes at most a third longer, and of two plans that peak within
    five percent of each other the one whose product of peak and time is less is taken.

    Args:
        graph: the weighted graph, from :func:`ogc.parse` or made by hand.
        memory_budget: the least recomputed time such that the simulated peak of activations fits: bytes, a
            text such as ``"8GB"`` or ``"512MiB"``, or a float in (0, 1], a share of the plain peak. With ``"least"``,
            the plan with the least peak whatever its time, and the least recomputed time at it.
        max_overhead: the least peak with at most this share of the plain step's time recomputed.
        solver: ``"optimal"`` or, to compare with, ``"none"`` (the plain model) or one of :mod:`ogc.solver.references`:
            ``"chen"``, ``"uniform"``, ``"binomial"``, ``"feng-huang"``. Only ``"optimal"`` takes a goal.
        effort: how long a local search improves what the dynamic program finds: 0 not at all, 1 for less time than
            that takes, 2 and 3 for ten and a hundred times as many moves. Without a compiler fewer are made.

    Returns:
        The plan. If the plain model meets the goal, or nothing beats it by more than half a percent of its peak, that
        is it (``plan.is_plain``). The plan of a reference solver is returned even where the plain model needs less.

    Raises:
        InputError: a goal is of the wrong kind, both are given, the solver is unknown or takes no goal, or this
            is no graph.
        SolveError: nothing fits the budget; the message says what would, and what stands in the way.
    """
    _check_graph(graph)
    check_effort(effort)
    goal = Goal(memory_budget, max_overhead)
    found = solver_of(solver, goal)
    return optimal(graph, goal, effort) if found is optimal else found(graph, goal)


@collecting_new_only()
@shown()
def frontier(graph: Graph, *, points: int = 16, budgets: Sequence[Budget] = ()) -> Frontier:
    """Plans from the least peak to the plain model.

    Each peak is looked at once, so a point may recompute a few percent more than what :func:`solve` finds for the same
    budget. Selective plans, which recompute whatever costs little wherever it is used, are tried too.

    Args:
        graph: the weighted graph.
        points: peaks to look at, evenly spaced on a logarithmic scale; plans that others beat are left out.
        budgets: further peaks to plan for, as :func:`solve` does for a ``memory_budget``; what nothing meets is
            left out.

    Returns:
        The plans, by ascending peak and descending overhead; hand any of them to :func:`ogc.apply`.
    """
    _check_graph(graph)
    plain = plain_plan(graph)
    if not len(graph):
        return Frontier((plain,))
    optimal(graph, LEAST_PEAK)
    for peak in sorted({bytes_of(budget, plain.peak_bytes) for budget in budgets}):
        with suppress(SolveError):
            optimal(graph, Goal(max(1, peak)))
    curve = front_of([*search_of(graph).curve(points), *_known_of(graph).plans])
    return Frontier(
        (*(plain.deciding(c.decisions, "optimal") for c in curve if c.peak_bytes < plain.peak_bytes), plain)
    )


def _check_graph(graph: Any) -> None:
    if not isinstance(graph, Graph):
        kind = type(graph).__name__
        raise InputError(f"graph must be a Graph, as ogc.parse(model, sample_input) returns, not {kind}")


def optimal(graph: Graph, goal: Goal, effort: int = 0) -> Plan:
    """The plan that is asked for, with the least peak that any has in :attr:`ogc.Plan.floor` where nothing is.

    Segments are saved, recomputed at once, or recomputed through parts (:mod:`ogc.solver.levels`). For a goal, one that
    is recomputed at once may also keep what is costly to make (:mod:`ogc.solver.candidates`).

    Raises:
        SolveError: nothing fits the budget; the message says what would, and what stands in the way.
    """
    plain = plain_plan(graph)
    budget, overhead = goal.budget_bytes(plain.peak_bytes), goal.max_overhead if goal else FAIR_OVERHEAD
    plain = replace(plain, budget_bytes=budget, max_overhead=goal.max_overhead)
    if not len(graph) or (budget is not None and plain.peak_bytes <= budget):
        return plain
    known, search = _known_of(graph), search_of(graph)
    if budget is not None:
        found = search.fastest(budget)
        if found is None and min([search.least_peak, *known.plans]).peak_bytes > budget:
            least = plain.deciding(min([search.least_peak, *known.plans]).decisions, "optimal")
            raise SolveError(_infeasible(graph, least, budget), least.peak_bytes)
    elif goal.max_overhead is not None:
        found = search.within(goal.max_overhead * graph.step_seconds)
    else:
        of_one_level = search_of(graph, nested=False)
        found = None if goal else fair(of_one_level, FAIR_OVERHEAD * graph.step_seconds)
        if goal or not is_late():
            known.plans.append(min(search.least_peak, of_one_level.least_peak))
            plain = replace(plain, floor=(known.plans[-1].peak_bytes, known.plans[-1].seconds))
    seconds = None if overhead is None or goal.is_least else overhead * graph.step_seconds
    aim, asked = Aim(plain.peak_bytes, graph.step_seconds, budget, seconds), (goal, effort)
    found = aim.best([found, known.answers.get(asked), *(known.plans if goal else ())])
    if found is not None and (moves := _moves(effort, graph, found)) and asked not in known.answers:
        found = polished(search.costs, found, aim, moves, nested=bool(goal))
    if not is_late():
        known.answer(asked, found)
    if plain.floor is not None and (lowest := min(filter(None, [found, *known.plans]), default=None)) is not None:
        plain = replace(plain, floor=(lowest.peak_bytes, lowest.seconds))
    slack = int(NEGLIGIBLE * plain.peak_bytes) if budget is None else 0
    if found is None or found.peak_bytes >= plain.peak_bytes - slack:
        return plain
    return plain.deciding(found.decisions, "optimal")


@dataclass
class _Known:
    """The plans of a graph that were found for any goal, and the best one for each; so no two answers contradict."""

    plans: list[Candidate] = field(default_factory=list)
    answers: dict[object, Candidate | None] = field(default_factory=dict)

    def answer(self, asked: object, found: Candidate | None) -> None:
        """Remember what was answered, and the plans that no other beats."""
        self.answers[asked] = found
        self.plans = front_of([*self.plans, *filter(None, [found])])


_known: dict[int, _Known] = {}


def _known_of(graph: Graph) -> _Known:
    if id(graph) not in _known:
        _known[id(graph)] = _Known()
        weakref.finalize(graph, _known.pop, id(graph))
    return _known[id(graph)]


EFFORTS = {0: 0, 1: 3_000, 2: 30_000, 3: 300_000}
"""Moves of the local search by ``effort``."""

MOVES_PER_OPERATION, MOVES_TIMES_OPERATIONS = 40, 2_000_000
"""Most moves with effort 1: short programs have few, and in long ones each takes longer."""

VALUES_PER_OPERATION = 50
"""Values of a run that take a simulation as long as an operation does: a plan of many levels has many runs."""

SLOWER = 50
"""How many times longer a simulation takes where none is compiled."""


def check_effort(effort: Any) -> None:
    """Raise InputError unless this is one."""
    if isinstance(effort, bool) or effort not in EFFORTS:
        raise InputError(f"effort must be 0, 1, 2 or 3, not {effort!r}")


def _moves(effort: int, graph: Graph, start: Candidate) -> int:
    moves = EFFORTS[effort]
    if effort == 1:
        steps = len(graph) + len(graph.values) * _runs(start.decisions.segments) // VALUES_PER_OPERATION
        moves = min(moves, MOVES_PER_OPERATION * len(graph), MOVES_TIMES_OPERATIONS // steps)
    return moves if library() is not None else moves // SLOWER


def _runs(segments: Sequence[Segment]) -> int:
    """How many recomputations there are of segments and their parts."""
    return sum(1 + _runs(segment.parts) for segment in segments if segment.parts)


def _infeasible(graph: Graph, least: Plan, budget: int) -> str:
    cost = simulate(graph, least)
    op = graph.operations[cost.peak_event.operation]
    where = " ".join(part for part in (op.module, f"({op.source})" if op.source else "") if part)
    largest = sorted(((graph.values[v].bytes, graph.values[v].name) for v in cost.peak_values), reverse=True)[:5]
    tensors = ", ".join(f"{name} {size / MIB:.1f} MiB" for size, name in largest)
    return (
        f"no plan found peaks at or below {budget / MIB:.1f} MiB ({budget} bytes); the smallest peak is "
        f"{least.peak_bytes / MIB:.1f} MiB ({least.peak_bytes} bytes) at {least.overhead:.1%} overhead. It is reached "
        f"in the {cost.peak_event.phase} of operation {op.name}, {op.target} {where}, with these alive: {tensors}"
    )


SOLVERS: dict[str, Solver] = {"optimal": optimal, "none": lambda graph, goal: plain_plan(graph), **REFERENCES}
"""All solvers by the names that :func:`ogc.solve` takes; only ``"optimal"`` takes a goal."""


def solver_of(name: str, goal: Goal) -> Solver:
    """The solver of this name, for this goal.

    Raises:
        InputError: there is none, or it takes no goal.
    """
    if name not in SOLVERS:
        raise InputError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, not {name!r}")
    if name != "optimal" and goal:
        raise InputError(f"solver={name!r} takes neither memory_budget nor max_overhead; only 'optimal' does")
    return SOLVERS[name]

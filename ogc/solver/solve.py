"""From a graph and a goal to a plan: ``solve``, ``frontier``, and the solvers by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import InputError, SolveError
from ..graph import MIB, Graph
from ..plan import Frontier, Plan, plain_plan, simulate
from ..plan.fast import library
from ..process import collecting_new_only, is_late, shown
from .candidates import Candidate
from .goal import FAIR_OVERHEAD, NEGLIGIBLE, Budget, Goal, Solver, bytes_of
from .polish import Price, polished
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
    effort: int = 1,
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
    if effort not in EFFORTS or isinstance(effort, bool):
        raise InputError(f"effort must be 0, 1, 2 or 3, not {effort!r}")
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
    search = search_of(graph)
    peaks = (bytes_of(budget, plain.peak_bytes) for budget in budgets)
    for peak in sorted((p for p in peaks if p < plain.peak_bytes), reverse=True):  # a table serves those below
        search.fastest(peak)
    found = (plain.deciding(c.decisions, "optimal") for c in search.curve(points) if c.peak_bytes < plain.peak_bytes)
    return Frontier((*found, plain))


def _check_graph(graph: Any) -> None:
    if not isinstance(graph, Graph):
        kind = type(graph).__name__
        raise InputError(f"graph must be a Graph, as ogc.parse(model, sample_input) returns, not {kind}")


def optimal(graph: Graph, goal: Goal, effort: int = 1) -> Plan:
    """The plan that is asked for, with the least peak that any has in :attr:`ogc.Plan.floor` where nothing is.

    Segments are saved, recomputed at once, or recomputed through parts (:mod:`ogc.solver.levels`). For a goal, one that
    is recomputed at once may also keep what is costly to make (:mod:`ogc.solver.candidates`).

    Raises:
        SolveError: nothing fits the budget; the message says what would, and what stands in the way.
    """
    plain = plain_plan(graph)
    budget = goal.budget_bytes(plain.peak_bytes)
    plain = replace(plain, budget_bytes=budget, max_overhead=goal.max_overhead)
    if not len(graph) or (budget is not None and plain.peak_bytes <= budget):
        return plain
    search, lowest, seconds = search_of(graph), None, goal.max_overhead
    if budget is not None:
        found = search.fastest(budget)
        if found is None:
            least = plain.deciding(search.least_peak.decisions, "optimal")
            raise SolveError(_infeasible(graph, least, budget), least.peak_bytes)
    elif seconds is not None:
        found = search.within(seconds * graph.step_seconds)
    else:
        of_one_level = search_of(graph, nested=False)
        if not goal:
            seconds = FAIR_OVERHEAD
            found = fair(of_one_level, seconds * graph.step_seconds)
        if goal or not is_late():
            lowest = min(search.least_peak, of_one_level.least_peak)
            found = lowest if goal else found
    if found is not None and (moves := _moves(effort, graph)):
        price = _price(graph, plain.peak_bytes, budget, seconds, is_fair=not goal)
        found = polished(search.costs, found, price, moves, nested=bool(goal))
    if lowest is not None:
        lowest = min(lowest, found or lowest)
        plain = replace(plain, floor=(lowest.peak_bytes, lowest.seconds))
    slack = int(NEGLIGIBLE * plain.peak_bytes) if budget is None else 0
    if found is None or found.peak_bytes >= plain.peak_bytes - slack:
        return plain
    return plain.deciding(found.decisions, "optimal")


EFFORTS = {0: 0, 1: 3_000, 2: 30_000, 3: 300_000}
"""Moves of the local search by ``effort``."""

MOVES_TIMES_OPERATIONS = 2_000_000
"""With effort 1, in long programs: a simulation takes the longer, the longer they are."""

SLOWER = 50
"""How many times longer a simulation takes where none is compiled."""

OVER, BROKEN = 3.0, 0.02
"""What a plan that misses its bound costs for each share of the plain step by which it does, and at least."""

BESIDE = 0.002
"""What time counts beside the peak where that is asked for, and the other way."""


def _moves(effort: int, graph: Graph) -> int:
    moves = EFFORTS[effort]
    if effort == 1:
        moves = min(moves, MOVES_TIMES_OPERATIONS // len(graph))
    return moves if library() is not None else moves // SLOWER


def _price(graph: Graph, plain: int, budget: int | None, overhead: float | None, is_fair: bool) -> Price:
    """What less of is better for a goal, as a share of the plain step's."""

    def missed(by: float) -> float:
        return OVER * by + BROKEN if by > 0 else 0.0

    def price(candidate: Candidate) -> float:
        peak, seconds = candidate.peak_bytes / plain, candidate.seconds / graph.step_seconds
        if budget is not None:
            return seconds + BESIDE * peak + missed((candidate.peak_bytes - budget) / plain)
        if overhead is not None:
            return peak * (1 + seconds * is_fair) + BESIDE * seconds + missed(seconds - overhead)
        return peak + BESIDE * seconds

    return price


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

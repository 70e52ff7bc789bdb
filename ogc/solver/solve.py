"""The solver's front door: a graph and a wish in, a described plan out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import InputError, SolveError
from ..graph import Graph
from ..plan import Frontier, Plan, make_plan, plain_plan, simulate
from ..torch_state.collecting import collecting_new_only
from .reference import REFERENCES
from .search import Candidate, Search

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

SOLVERS = ("optimal", "none", *REFERENCES)
"""The names that :func:`solve` takes."""

Budget = int | float | str


@collecting_new_only()
def solve(
    graph: Graph,
    *,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    solver: str = "optimal",
) -> Plan:
    """The plan that a wish asks for.

    Without a wish: the least peak, and the least recomputed time at it. Plans are trees of segments, each
    saved, recomputed at once, or recomputed through parts; see :mod:`ogc.solver.nested`. With one, a segment
    that is recomputed at once may also keep what is costly to make; see :mod:`ogc.solver.keeping`.

    Args:
        graph: the weighted graph, from :func:`ogc.parse` or made by hand.
        memory_budget: the least recomputed time such that the simulated peak of activations fits: bytes, a
            text such as ``"8GB"`` or ``"512MiB"``, or a float in (0, 1], a share of the plain peak.
        max_overhead: the least peak with at most this share of the plain step's time recomputed.
        solver: ``"optimal"`` or, to compare with, ``"none"`` (the plain model) or one of
            :mod:`ogc.solver.reference`: ``"chen"``, ``"uniform"``, ``"binomial"``, ``"feng-huang"``. Only
            ``"optimal"`` takes a wish.

    Returns:
        The plan. If the plain model meets the wish, or nothing beats it, that is it (``plan.is_plain``). The
        plan of a reference solver is returned even where the plain model needs less.

    Raises:
        InputError: a wish is of the wrong kind, both are given, the solver is unknown or takes no wish, or this
            is no graph.
        SolveError: nothing fits the budget; the message says what would, and what stands in the way.
    """
    _check_graph(graph)
    check_wish(memory_budget, max_overhead, solver)
    if solver != "optimal":
        return _reference_plan(graph, solver)
    plain = plain_plan(graph)
    budget = None if memory_budget is None else bytes_of(memory_budget, plain.peak_bytes)
    plain = replace(plain, budget_bytes=budget)
    if not len(graph) or (budget is not None and plain.peak_bytes <= budget):
        return plain
    search = Search(graph)
    if budget is not None:
        found = search.fastest(budget)
        if found is None:
            raise SolveError(_infeasible(graph, _plan_of(graph, search.least_peak, "optimal", plain), budget))
    elif max_overhead is not None:
        found = search.within(max_overhead * graph.step_seconds)
        if found is None:
            return plain
    else:
        found = search.least_peak
    plan = _plan_of(graph, found, "optimal", plain)
    return plan if plan.peak_bytes < plain.peak_bytes else plain


def check_wish(memory_budget: Budget | None, max_overhead: float | None, solver: str) -> None:
    """Raise InputError unless :func:`solve` can be asked for this."""
    if solver not in SOLVERS:
        raise InputError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, not {solver!r}")
    if solver != "optimal" and (memory_budget is not None or max_overhead is not None):
        raise InputError(f"solver={solver!r} takes neither memory_budget nor max_overhead; only 'optimal' does")
    if memory_budget is not None and max_overhead is not None:
        raise InputError("give memory_budget or max_overhead, not both: each is bounded as the other allows")
    if max_overhead is not None and not (_is_number(max_overhead) and max_overhead >= 0):
        raise InputError(f"max_overhead must be a share of the plain step's time, such as 0.2, not {max_overhead!r}")
    if memory_budget is not None:
        bytes_of(memory_budget, 1)


def _reference_plan(graph: Graph, solver: str) -> Plan:
    if solver == "none" or not len(graph):
        return plain_plan(graph)
    return make_plan(graph, REFERENCES[solver](graph), solver)


@collecting_new_only()
def frontier(graph: Graph, *, points: int = 16, budgets: Sequence[Budget] = ()) -> Frontier:
    """Plans from the least peak to the plain model.

    Each peak is looked at once, so that many plans take little longer than one: a point may recompute a few percent
    more than what :func:`solve` finds for the same budget. Plans that make whatever costs little again wherever it is
    used are tried too, as in selective checkpointing; they are the best where time is counted in FLOPs.

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
    search = Search(graph)
    peaks = (bytes_of(budget, plain.peak_bytes) for budget in budgets)
    for peak in sorted((p for p in peaks if p < plain.peak_bytes), reverse=True):  # a table serves those below
        search.fastest(peak)
    found = [_plan_of(graph, c, "optimal", plain) for c in search.curve(points)]
    return Frontier((*(plan for plan in found if plan.peak_bytes < plain.peak_bytes), plain))


def _check_graph(graph: Any) -> None:
    if not isinstance(graph, Graph):
        raise InputError(
            f"graph must be a Graph, as ogc.parse(model, sample_input) returns, not {type(graph).__name__}"
        )


def _is_number(wish: Any) -> bool:
    return isinstance(wish, (int, float)) and not isinstance(wish, bool)


def bytes_of(budget: Budget, plain: int) -> int:
    """The number of bytes that a budget stands for, where the plain model peaks at ``plain``.

    Raises:
        InputError: it stands for none.
    """
    wrong = InputError(
        f"memory_budget must be bytes, a text like '8GB' or '512MiB', or a share in (0, 1] of the plain peak, "
        f"not {budget!r}"
    )
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?)?b?\s*", budget.lower())
        if found is None:
            raise wrong
        return int(float(found[1]) * UNITS[found[2] or ""])
    if not _is_number(budget) or not budget > 0:
        raise wrong
    if isinstance(budget, int):
        return budget
    if budget > 1:
        raise wrong
    return int(budget * plain)


def _infeasible(graph: Graph, least: Plan, budget: int) -> str:
    cost = simulate(graph, least)
    op = graph.operations[cost.peak_event.operation]
    where = " ".join(part for part in (op.module, f"({op.source})" if op.source else "") if part)
    largest = sorted(((graph.values[v].bytes, graph.values[v].name) for v in cost.peak_values), reverse=True)[:5]
    tensors = ", ".join(f"{name} {size / 1e6:.1f} MB" for size, name in largest)
    return (
        f"no plan found peaks at or below {budget / 1e6:.1f} MB ({budget} bytes); the smallest peak is "
        f"{least.peak_bytes / 1e6:.1f} MB ({least.peak_bytes} bytes) at {least.overhead:.1%} overhead. It is reached "
        f"in the {cost.peak_event.phase} of operation {op.name}, {op.target} {where}, with these alive: {tensors}"
    )


def _plan_of(graph: Graph, found: Candidate, solver: str, plain: Plan) -> Plan:
    return replace(
        plain,
        decisions=found.decisions,
        peak_bytes=found.peak_bytes,
        recomputed_seconds=found.seconds,
        recomputed_flops=found.flops,
        solver=solver,
    )

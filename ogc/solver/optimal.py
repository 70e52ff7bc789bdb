"""The solver that the library is about: the best plan that the search finds, or the plain model where nothing beats it.

Plans are trees of segments, each saved, recomputed at once, or recomputed through parts; see
:mod:`ogc.solver.nested`. For a wish, a segment that is recomputed at once may also keep what is costly to make; see
:mod:`ogc.solver.keeping`.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import SolveError
from ..graph import Graph
from ..plan import Plan, plain_plan, simulate
from .polish import Candidate
from .search import Search
from .wish import Wish


def optimal(graph: Graph, wish: Wish) -> Plan:
    """The plan with the least peak, and the least recomputed time at it; or what is asked for instead.

    Raises:
        SolveError: nothing fits the budget; the message says what would, and what stands in the way.
    """
    plain = plain_plan(graph)
    budget = wish.budget_bytes(plain.peak_bytes)
    plain = replace(plain, budget_bytes=budget)
    if not len(graph) or (budget is not None and plain.peak_bytes <= budget):
        return plain
    search = Search(graph)
    found: Candidate | None = None
    if budget is not None:
        found = search.fastest(budget)
        if found is None:
            raise SolveError(_infeasible(graph, search.least_peak.as_plan(plain), budget))
    elif wish.max_overhead is not None:
        found = search.within(wish.max_overhead * graph.step_seconds)
    else:
        found = search.least_peak
    return found.as_plan(plain) if found is not None and found.peak_bytes < plain.peak_bytes else plain


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

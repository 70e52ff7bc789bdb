"""The solvers by name."""

from __future__ import annotations

from ..errors import InputError
from ..graph import Graph
from ..plan import Plan, plain_plan
from .optimal import optimal
from .references import REFERENCES
from .wish import Solver, Wish


def none(graph: Graph, wish: Wish) -> Plan:
    """The plain model."""
    return plain_plan(graph)


SOLVERS: dict[str, Solver] = {"optimal": optimal, "none": none, **REFERENCES}
"""All solvers by the names that :func:`ogc.solve` takes; only ``"optimal"`` takes a wish."""


def solver_of(name: str, wish: Wish) -> Solver:
    """The solver of this name, for this wish.

    Raises:
        InputError: there is none, or it takes no wish.
    """
    if name not in SOLVERS:
        raise InputError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, not {name!r}")
    if name != "optimal" and wish:
        raise InputError(f"solver={name!r} takes neither memory_budget nor max_overhead; only 'optimal' does")
    return SOLVERS[name]

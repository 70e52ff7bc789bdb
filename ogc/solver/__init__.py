"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .simulate import Event, Simulation, lower_bound, simulate
from .solve import SOLVERS, Budget, Frontier, frontier, make_plan, plain_plan, solve

__all__ = [
    "SOLVERS",
    "Budget",
    "Event",
    "Frontier",
    "Simulation",
    "frontier",
    "lower_bound",
    "make_plan",
    "plain_plan",
    "simulate",
    "solve",
]

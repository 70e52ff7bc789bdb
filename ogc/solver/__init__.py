"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .simulate import Event, Moment, Simulation, lower_bound, simulate, trace
from .solve import SOLVERS, Budget, Frontier, frontier, make_plan, plain_plan, solve

__all__ = [
    "SOLVERS",
    "Budget",
    "Event",
    "Frontier",
    "Moment",
    "Simulation",
    "frontier",
    "lower_bound",
    "make_plan",
    "plain_plan",
    "simulate",
    "solve",
    "trace",
]

"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .simulate import Event, Moment, PartCost, Simulation, lower_bound, part_cost, simulate, trace
from .solve import SOLVERS, Budget, Frontier, frontier, make_plan, plain_plan, solve

__all__ = [
    "SOLVERS",
    "Budget",
    "Event",
    "Frontier",
    "Moment",
    "PartCost",
    "Simulation",
    "frontier",
    "lower_bound",
    "make_plan",
    "part_cost",
    "plain_plan",
    "simulate",
    "solve",
    "trace",
]

"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .goal import FAIR, FAIR_OVERHEAD, LEAST, LEAST_PEAK, NEGLIGIBLE, Budget, Goal, Solver
from .solve import SOLVERS, SolveOptions, frontier, optimal, solve

__all__ = [
    "FAIR",
    "FAIR_OVERHEAD",
    "LEAST",
    "LEAST_PEAK",
    "NEGLIGIBLE",
    "SOLVERS",
    "Budget",
    "Goal",
    "SolveOptions",
    "Solver",
    "frontier",
    "optimal",
    "solve",
]

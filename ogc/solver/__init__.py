"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .goal import LEAST_PEAK, NEGLIGIBLE, Budget, Goal, Solver, bytes_of
from .solve import SOLVERS, frontier, solve, solver_of

__all__ = [
    "LEAST_PEAK",
    "NEGLIGIBLE",
    "SOLVERS",
    "Budget",
    "Goal",
    "Solver",
    "bytes_of",
    "frontier",
    "solve",
    "solver_of",
]

"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .goal import FAIR, FAIR_OVERHEAD, LEAST, LEAST_PEAK, NEGLIGIBLE, Budget, Goal, Solver, bytes_of
from .solve import SOLVERS, frontier, optimal, solve, solver_of

__all__ = [
    "FAIR",
    "FAIR_OVERHEAD",
    "LEAST",
    "LEAST_PEAK",
    "NEGLIGIBLE",
    "SOLVERS",
    "Budget",
    "Goal",
    "Solver",
    "bytes_of",
    "frontier",
    "optimal",
    "solve",
    "solver_of",
]

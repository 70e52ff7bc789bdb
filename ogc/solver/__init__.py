"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .solve import SOLVERS, frontier, solve, solver_of
from .wish import LEAST_PEAK, NEGLIGIBLE, Budget, Solver, Wish, bytes_of

__all__ = [
    "LEAST_PEAK",
    "NEGLIGIBLE",
    "SOLVERS",
    "Budget",
    "Solver",
    "Wish",
    "bytes_of",
    "frontier",
    "solve",
    "solver_of",
]

"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .solve import SOLVERS, Budget, frontier, solve

__all__ = ["SOLVERS", "Budget", "frontier", "solve"]

"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .solve import SOLVERS, Budget, Frontier, frontier, make_plan, plain_plan, solve

__all__ = ["SOLVERS", "Budget", "Frontier", "frontier", "make_plan", "plain_plan", "solve"]

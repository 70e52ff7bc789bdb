"""Weights of every stretch of a program between two cuts, for the search."""

from .arrays import boundary_bytes
from .segments import SegmentCosts
from .weights import AGAIN, NEVER, SAVED, Costs, Ints, NestedCosts

__all__ = ["AGAIN", "NEVER", "SAVED", "Costs", "Ints", "NestedCosts", "SegmentCosts", "boundary_bytes"]

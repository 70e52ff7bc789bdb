"""Weights of every stretch of a program between two cuts, for the search."""

from .arrays import NEVER, Ints, boundary_bytes
from .segments import RECOMPUTED, SAVED, Costs, NestedCosts, SegmentCosts

__all__ = ["NEVER", "RECOMPUTED", "SAVED", "Costs", "Ints", "NestedCosts", "SegmentCosts", "boundary_bytes"]

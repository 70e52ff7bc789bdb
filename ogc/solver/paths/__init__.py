"""The fastest path through the cuts of a program within so many bytes: labels, and prices that bound them."""

from .constrained_path import LABELS, SLACK, ConstrainedPaths

__all__ = ["LABELS", "SLACK", "ConstrainedPaths"]

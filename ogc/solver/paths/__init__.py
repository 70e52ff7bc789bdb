"""The fastest path through the cuts of a program within so many bytes: labels, and prices that bound them."""

from .constrained_path import LABELS, NEAR_ENOUGH, SLACK, ConstrainedPaths

__all__ = ["LABELS", "NEAR_ENOUGH", "SLACK", "ConstrainedPaths"]

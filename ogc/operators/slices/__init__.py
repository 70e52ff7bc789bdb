"""Stretches that run a part of what they are given at a time, as one operator each."""

from .loss import SlicedLoss
from .stretch import Sliced

__all__ = ["Sliced", "SlicedLoss"]

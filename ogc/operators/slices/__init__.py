"""Stretches as one operator each: that run a part of what they are given at a time, or compiled."""

from .compiled import Compiled, Compiler
from .loss import SlicedLoss
from .stretch import Sliced

__all__ = ["Compiled", "Compiler", "Sliced", "SlicedLoss"]

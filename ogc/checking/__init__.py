"""Holds an optimized model against the plain one, step by step and bit by bit."""

from .check import Checker, check
from .report import CheckReport, Difference

__all__ = ["CheckReport", "Checker", "Difference", "check"]

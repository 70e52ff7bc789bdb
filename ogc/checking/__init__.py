"""Holds an optimized model against the plain one, step by step and bit by bit."""

from .check import Checker, CheckReport, check
from .step import Difference

__all__ = ["CheckReport", "Checker", "Difference", "check"]

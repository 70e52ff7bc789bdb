"""Optimal gradient checkpointing for PyTorch: the same model in a fraction of the activation memory."""

from .builder import GraphBuilder
from .check import Checker, check
from .check_report import CheckReport, Difference
from .errors import CheckError, DependencyError, InputError, OgcError, ParseError, PlanError, ReplayError, SolveError
from .graph import Graph, Operation, Value
from .in_parts import PartsPlan
from .optimize import apply, optimize
from .parser import parse
from .plan import Plan, Segment, recomputed, saved
from .slicing import slice_batch
from .solver import Frontier, frontier, make_plan, simulate, solve

__version__ = "0.1.0"

__all__ = [
    "CheckError",
    "CheckReport",
    "Checker",
    "DependencyError",
    "Difference",
    "Frontier",
    "Graph",
    "GraphBuilder",
    "InputError",
    "OgcError",
    "Operation",
    "ParseError",
    "PartsPlan",
    "Plan",
    "PlanError",
    "ReplayError",
    "Segment",
    "SolveError",
    "Value",
    "apply",
    "check",
    "frontier",
    "make_plan",
    "optimize",
    "parse",
    "recomputed",
    "saved",
    "simulate",
    "slice_batch",
    "solve",
]

"""Optimal gradient checkpointing for PyTorch: the same model in a fraction of the activation memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checking.check import Checker, CheckReport, check
    from .checking.step import Difference
    from .compiling.partitioner import Partitioner
    from .errors import (
        CheckError,
        DependencyError,
        InputError,
        OgcError,
        ParseError,
        PlanError,
        ReplayError,
        SolveError,
    )
    from .graph import Graph, Host, Operation, Value
    from .in_parts import PartsPlan
    from .optimizing import optimize
    from .parser import parse
    from .parser.custom import GraphBuilder
    from .plan import (
        Decisions,
        Frontier,
        Offload,
        Plan,
        Policy,
        Segment,
        load_plan,
        make_plan,
        recomputed,
        saved,
        simulate,
    )
    from .planned import apply
    from .planning import with_host
    from .rewrites.chunking import chunk_batch
    from .sizing.largest import LargestBatch, largest_batch, largest_batches
    from .sizing.needs import Estimate, estimate
    from .solver import frontier, solve
    from .torch_state.pipelines import in_flight

__version__ = "0.2.0"

_HOMES = {
    "checking": ("CheckReport", "Checker", "Difference", "check"),
    "compiling.partitioner": ("Partitioner",),
    "errors": (
        *("CheckError", "DependencyError", "InputError", "OgcError"),
        *("ParseError", "PlanError", "ReplayError", "SolveError"),
    ),
    "graph": ("Graph", "Host", "Operation", "Value"),
    "in_parts": ("PartsPlan",),
    "optimizing": ("optimize",),
    "parser": ("parse",),
    "parser.custom": ("GraphBuilder",),
    "plan": (
        *("Decisions", "Policy", "Frontier", "Offload", "Plan", "Segment"),
        *("load_plan", "make_plan", "recomputed", "saved", "simulate"),
    ),
    "planned": ("apply",),
    "planning": ("with_host",),
    "rewrites.chunking": ("chunk_batch",),
    "sizing.largest": ("LargestBatch", "largest_batch", "largest_batches"),
    "sizing.needs": ("Estimate", "estimate"),
    "solver": ("frontier", "solve"),
    "torch_state.pipelines": ("in_flight",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Public names are fetched when they are asked for: the graph, its plans and the solver do without torch."""
    if name in _HOMES:
        return import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .errors import optional

    globals()[name] = found = getattr(optional(_HOME_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]

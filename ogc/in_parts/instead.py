"""Whether a model is planned in parts instead of as a whole: where that cannot be, or is worse."""

from __future__ import annotations

import logging
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import torch

from ..errors import ParseError, SolveError
from ..graph import Graph
from ..plan import Plan, SavedPlan
from ..plan.simulate import plain_peak
from ..program.leaf import Leaf
from ..torch_state.forwards import only_holds
from .make import optimize_in_parts
from .options import Options
from .plan import PartsPlan

log = logging.getLogger(__name__)

HEAVY = 1 / 3
"""Share of the plain peak that leaves hold from which on it is tried to plan what is in them."""


def heavy_leaves(model: torch.nn.Module, graph: Graph, options: Options) -> dict[str, str]:
    """The modules that have to stay Python if leaves are to be planned inside, by name, and why.

    Args:
        model: as for :func:`ogc.optimize`.
        graph: of the whole model.
        options: leaves that they name are not among them.

    Returns:
        Nothing unless leaves hold a good part of the plain peak.
    """
    asked = set(options.asked_for(model))
    nodes = zip(graph.operations[: graph.end], graph.program.operations, strict=True)
    leaves = [(op, node.target.submodule) for op, node in nodes if isinstance(node.target, Leaf)]
    held = [(op.internal_bytes, name) for op, name in leaves if name is not None and name not in asked]
    if options.solver != "optimal" or not held or sum(size for size, _ in held) < HEAVY * plain_peak(graph):
        return {}
    around = chain.from_iterable(list(accumulate(name.split("."), "{}.{}".format))[:-1] for _, name in held)
    names = ["", *(name for name in around if not only_holds(model.get_submodule(name)))]
    return dict.fromkeys(names, "leaves in it would hold much of the memory")


def in_parts_instead(
    model: torch.nn.Module, sample_input: Any, options: Options, problem: ParseError, saved: SavedPlan | None
) -> Any:
    """The model with its parts planned, where the whole cannot be; None if a saved plan does not keep the wish."""
    why = str(problem).partition(" Nothing smaller")[0].rstrip(".")
    try:
        return optimize_in_parts(model, sample_input, options, {"": why}, saved=saved)
    except ParseError as error:
        raise ParseError(f"{why}. {error}") from problem


def in_parts_if_better(
    model: torch.nn.Module,
    sample_input: Any,
    options: Options,
    heavy: dict[str, str],
    found: tuple[Graph, Plan] | SolveError,
) -> torch.nn.Module | None:
    """The model in parts, where that meets the wish better than one plan whose leaves hold much; else None."""

    def is_better(plan: PartsPlan) -> bool:
        if isinstance(found, SolveError):
            return True
        cost = attrgetter("peak_bytes" if options.wish.memory_budget is None else "added_seconds")
        return bool(cost(plan) < cost(found[1]))

    if not heavy:
        return None
    try:
        return optimize_in_parts(model, sample_input, options, heavy, is_better)
    except (ParseError, SolveError) as error:
        log.info("what is in leaves is not planned: %s", error)
        return None

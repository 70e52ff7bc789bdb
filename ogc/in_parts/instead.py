"""Whether a model is planned in parts instead of as a whole: where that cannot be, or is worse."""

from __future__ import annotations

import logging
from operator import attrgetter
from typing import Any

import torch

from ..errors import ParseError, SolveError
from ..graph import Graph
from ..plan import Plan, SavedPlan
from .make import optimize_in_parts
from .options import Options
from .plan import PartsPlan

log = logging.getLogger(__name__)


def in_parts_instead(
    model: torch.nn.Module, sample_input: Any, options: Options, problem: ParseError, saved: SavedPlan | None
) -> Any:
    """The model with its parts planned, where the whole cannot be; None if a saved plan does not keep the wish."""
    why = {"": str(problem).partition(" Nothing smaller")[0]}
    try:
        return optimize_in_parts(model, sample_input, options, why, saved=saved)
    except ParseError as error:
        raise ParseError(f"{problem} {error}") from problem


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

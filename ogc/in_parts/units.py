"""Models that are sharded unit by unit: each unit is planned with its first call, when its parameters are there.

What a unit runs again in its backward runs between the hooks that gather its parameters for that and let go of them: it
needs no gathering of its own. Equal units are planned once.
"""

from __future__ import annotations

import torch

from ..errors import InputError, ParseError
from ..torch_state.ranks.shards import planned_apart
from .module import Parts, module_in_parts
from .options import Options
from .share import LatePlanner


def optimize_units(model: torch.nn.Module, options: Options) -> torch.nn.Module:
    """The model with its units, and what is around them, planned with their first calls.

    Args:
        model: some submodules of it are units of ``fully_shard``.
        options: a wish for a share, of bytes or of time, holds for each unit by itself.

    Raises:
        ParseError: there is nothing to plan.
    """
    closed = options.asked_for(model)
    late = {
        name: module
        for name, module in planned_apart(model)
        if not any(f"{name}.".startswith(f"{leaf}.") for leaf in closed)
    }
    if not late:
        raise ParseError("no submodule of the sharded model is trained and called with all its parameters at hand")
    return module_in_parts(model, Parts([], late, LatePlanner(options, [])), {})


def check_wish_of_units(options: Options, batch_slices: int) -> None:
    """Raise InputError if the wish can only be met for the model as a whole."""
    if options.wish.is_in_bytes:
        raise InputError(
            "the model is sharded, and its units are planned one by one: a budget in bytes is for all of them; give a "
            "share, such as memory_budget=0.4, or max_overhead"
        )
    if batch_slices > 1:
        raise InputError("the model is sharded, and its units are planned one by one: batch_slices does not go with it")

"""Models that are sharded unit by unit: each unit is planned with its first call, when its parameters are there.

What a unit runs again in its backward runs between the hooks that gather its parameters for that and let go of them: it
needs no gathering of its own. Equal units are planned once.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import InputError, ParseError
from ..plan import part_cost, plain_plan
from ..torch_state.forwards import is_compiled
from ..torch_state.ranks import planned_apart
from .choice.combine import Problem, Stop
from .module import Parts, module_in_parts
from .options import Options
from .plan import PartPlan, PartsPlan, PlainRest
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
        if not is_compiled(module) and not any(f"{name}.".startswith(f"{leaf}.") for leaf in closed)
    }
    if not late:
        raise ParseError("no submodule of the sharded model is trained and called with all its parameters at hand")
    parts, names = Parts([], late, LatePlanner(options, [])), {id(module): name for name, module in late.items()}
    return module_in_parts(model, parts, {"plan": property(lambda self: _plan_so_far(parts, names, options))})


def _plan_so_far(parts: Parts, names: dict[int, str], options: Options) -> PartsPlan:
    """The plans of the units that were called, as if each was called once in a step."""
    planned = [(names[key], twin.runner.sample) for key, twin in parts.twins.items()]
    found = [(name, one.graph, replace(one.plan, graph=one.graph)) for name, one in planned if one.graph and one.plan]
    ways = [(part_cost(graph, plan), part_cost(graph, plain_plan(graph))) for _, graph, plan in found]
    problem = Problem(tuple(map(Stop, range(len(found)))), tuple(ways))
    return PartsPlan(
        parts=tuple(PartPlan(name, 1, plan, way[0]) for (name, _, plan), way in zip(found, ways, strict=True)),
        plain=(PlainRest("", "is sharded; its units are planned with their first calls"),),
        peak_bytes=problem.peak((0,) * len(found)),
        plain_peak_bytes=problem.peak((1,) * len(found)),
        rest_bytes=0,
        part_seconds=sum(plan.step_seconds for _, _, plan in found),
        recomputed_seconds=problem.seconds((0,) * len(found)),
        is_measured=False,
        solver=options.solver,
    )


def check_wish_of_units(options: Options, batch_slices: int) -> None:
    """Raise InputError if the wish can only be met for the model as a whole."""
    if options.wish.is_in_bytes:
        raise InputError(
            "the model is sharded, and its units are planned one by one: a budget in bytes is for all of them; give a "
            "share, such as memory_budget=0.4, or max_overhead"
        )
    if batch_slices > 1:
        raise InputError("the model is sharded, and its units are planned one by one: batch_slices does not go with it")

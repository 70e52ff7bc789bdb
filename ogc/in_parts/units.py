"""Models that ``fully_shard`` has sharded: their units share one goal.

The units' parameters are there only while they run, so each is planned with its first call. What plan it gets is chosen
before, for all at once, on a whole model: one of the same modules, in which all parameters lie in one memory of zeros.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from ..errors import InputError, OgcError, ParseError, SolveError
from ..planning import PlanOptions
from ..program.program import device_of_model
from ..torch_state.forwards import is_compiled, original_class
from ..torch_state.private import CALL, HOOKS
from ..torch_state.ranks import (
    before_sharding,
    bytes_of_sharding,
    gathered_by,
    is_of_sharding,
    is_wrapper,
    planned_apart,
)
from .find import Part
from .joined import BACK, REGION_BACK, Joined, Key, PartCost, usual_events
from .late import LatePlanner, Share
from .make import plans_of_parts
from .module import Parts, module_in_parts
from .plan import PartPlan, PartsPlan, PlainModule

log = logging.getLogger(__name__)

SHARDING_STATE = "__composable_api"
"""What the names begin with under which ``fully_shard`` keeps its state in a module."""

SHARDED = "is sharded; its units are planned with their first calls"


def check_goal_of_units(model: torch.nn.Module, options: PlanOptions, chunks: int) -> None:
    """Raise InputError if the goal can only be met for the model as a whole."""
    if options.goal.is_in_bytes and any(map(is_wrapper, model.modules())):
        raise InputError(
            "the model is in FullyShardedDataParallel, and its units are planned one by one: a budget in bytes is for "
            "all of them; shard it by fully_shard, or give a share, such as memory_budget=0.4, or max_overhead"
        )
    if chunks > 1:
        raise InputError("the model is sharded, and its units are planned one by one: chunks does not go with it")


def optimize_units(model: torch.nn.Module, sample_input: Any, options: PlanOptions) -> torch.nn.Module:
    """The model with its units, and what is around them, planned with their first calls.

    Args:
        model: some submodules of it are units of ``fully_shard``.
        sample_input: of a call of it.
        options: the goal is one of all units. Where the model cannot be planned without its shards, a share, of bytes
            or of time, holds for each unit by itself.

    Raises:
        ParseError: there is nothing to plan, or no budget in bytes can be shared.
        SolveError: nothing fits the budget.
    """
    closed = options.parsing.asked_for(model)
    late = {
        name: module
        for name, module in planned_apart(model)
        if not is_compiled(module) and not any(f"{name}.".startswith(f"{one}.") for one in closed)
    }
    if not late:
        raise ParseError("no submodule of the sharded model is trained and called with all its parameters available")
    examples: list[tuple[Part, Share]] = []
    try:
        plan, examples = _shared(model, sample_input, options, late)
    except SolveError:
        raise
    except (OgcError, RuntimeError, TypeError, AttributeError) as error:
        if options.goal.is_in_bytes:
            raise ParseError(
                f"a budget in bytes is one for all units, and they cannot be planned together: {error}; give a share, "
                "such as memory_budget=0.4, or max_overhead"
            ) from error
        log.warning(
            "the goal holds for each unit of the sharded model by itself, as they cannot be planned together: %s", error
        )
        plan = None
    parts = Parts([], late, LatePlanner(options, examples))
    names = {id(module): name for name, module in late.items()}
    shown = property(lambda self: _plan_so_far(parts, names, options)) if plan is None else plan
    return module_in_parts(model, parts, {"plan": shown})


def _shared(
    model: torch.nn.Module, sample_input: Any, options: PlanOptions, late: dict[str, torch.nn.Module]
) -> tuple[PartsPlan, list[tuple[Part, Share]]]:
    """One plan of all units, and what each part of it takes."""
    around = ("", *(name for one in late for name in list(accumulate(one.split("."), "{}.{}".format))[:-1]))
    plain = dict.fromkeys(around, SHARDED)
    return plans_of_parts(unsharded(model), sample_input, options, plain, beside_units(model))


def _plan_so_far(parts: Parts, names: dict[int, str], options: PlanOptions) -> PartsPlan:
    """The plans of the units that were called, as if each was called once in a step."""
    planned = [(names[key], member.runner.sample) for key, member in parts.members.items()]
    found = [(name, one.graph, replace(one.plan, graph=one.graph)) for name, one in planned if one.graph and one.plan]
    choice, calls = tuple(plan for *_, plan in found), tuple(range(len(found)))
    step = Joined(
        tuple(graph for _, graph, _ in found),
        calls,
        tuple(name for name, *_ in found),
        usual_events(len(calls)),
        ((),) * len(calls),
    )
    return PartsPlan(
        parts=tuple(PartPlan(name, 1, plan, PartCost.of(graph, plan)) for name, graph, plan in found),
        plain=(PlainModule("", SHARDED),),
        peak_bytes=step.peak(choice) if found else 0,
        plain_peak_bytes=step.peak(step.plain) if found else 0,
        outside_bytes=0,
        part_seconds=step.part_seconds,
        recomputed_seconds=step.seconds(choice),
        is_measured=False,
        solver=options.solving.solver,
    )


# -- a whole model ---------------------------------------------------------------------------------------


def unsharded(model: torch.nn.Module) -> torch.nn.Module:
    """The model as it was before ``fully_shard``, with parameters of the types that they are gathered in."""
    dtypes = {key: dtype for one in gathered_by(model) for key, dtype in one.dtypes.items()}
    return _alike(model, {id(p): (p.shape, dtypes.get(id(p), p.dtype)) for p in model.parameters()})


def shards_alone(model: torch.nn.Module) -> torch.nn.Module:
    """The model with this rank's parts as its parameters."""
    shards = {key: shard for one in gathered_by(model) for key, shard in one.shards.items()}
    own = {id(p): shards.get(id(p), p) for p in model.parameters()}
    return _alike(model, {key: (tensor.shape, tensor.dtype) for key, tensor in own.items()})


def _alike(model: torch.nn.Module, specs: Mapping[int, tuple[torch.Size, torch.dtype]]) -> torch.nn.Module:
    """A model of the same modules, without sharding, in which parameters of other shapes share one memory of zeros.

    What else it holds is copied.
    """
    size = max((shape.numel() * dtype.itemsize for shape, dtype in specs.values()), default=0)
    memory = torch.zeros(size, dtype=torch.uint8, device=device_of_model(model))
    memo: dict[int, Any] = {}
    for p in model.parameters():
        shape, dtype = specs[id(p)]
        entries = memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
        memo[id(p)] = torch.nn.Parameter(entries, p.requires_grad)
    modules = list(model.modules())
    for module in modules:
        kind = before_sharding(original_class(module))
        memo[id(module)] = kind.__new__(kind)
    for module in modules:
        vars(memo[id(module)]).update(copy.deepcopy(dict(_own(vars(module))), memo))
    found: torch.nn.Module = memo[id(model)]
    return found


def _own(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The attributes of a module but for what sharding has put there, its hooks among them."""
    hooks = [(key, hook) for name in HOOKS for key, hook in attributes[name].items()]
    of_sharding = {key for key, hook in hooks if is_of_sharding(getattr(hook, "__self__", None))}
    for name, value in attributes.items():
        if name == CALL or is_of_sharding(value) or name.startswith(SHARDING_STATE):
            continue
        if name.endswith(("state_dict_hooks", "state_dict_pre_hooks", "state_dict_post_hooks")):
            value = type(value)()
        elif name.startswith(HOOKS):
            value = type(value)((key, hook) for key, hook in value.items() if key not in of_sharding)
        yield name, value


# -- what sharding takes ---------------------------------------------------------------------------------


def beside_units(model: torch.nn.Module) -> Callable[[Key], int]:
    """The most bytes of parameters and their gradients that sharding has during an event of a step."""
    found = list(gathered_by(model))
    kept = sum(one.bytes for one in found if one.is_kept)
    waiting = sum(one.bytes for one in found if one.is_around)
    unit = max((one.bytes for one in found if not one.is_kept), default=0)
    reduced = max((one.reduced_bytes for one in found if not one.is_around), default=0)
    forward, backward = bytes_of_sharding(unit, reduced, kept, waiting)
    return lambda key: backward if key[0] in (BACK, REGION_BACK) else forward

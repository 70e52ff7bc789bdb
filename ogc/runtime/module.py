"""The module that users get: the original's parameters and submodules, a planned forward."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..errors import InputError
from ..graph import Graph
from ..plan import Plan
from .runner import Planner, Runner, log


def optimized_module(
    model: torch.nn.Module, graph: Graph, plan: Plan, planner: Planner | None = None
) -> torch.nn.Module:
    """A module that shares everything with ``model`` and runs ``plan`` in training.

    It is an instance of a subclass of the model's own class and shares its attributes, so that parameters,
    buffers, flags and methods are one and the same for both. The forward of the original is untouched.
    Calls that ``plan`` was not made for run what ``planner`` finds for them.
    """
    if "forward" in vars(model):
        raise InputError(
            "the model's forward was replaced on the instance, so a planned one could not take its place; "
            "put the replacement into a subclass"
        )
    runner = Runner(model, graph, plan, planner)
    original = getattr(type(model), "_ogc_original", type(model))  # an optimized module may be optimized again

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        variant = runner.select(self, args, kwargs)
        if variant is None:
            return original.forward(self, *args, **kwargs)
        return runner.run(variant, self, args, kwargs)

    def refuse_pickling(self: torch.nn.Module) -> Any:
        raise InputError(
            "an optimized module cannot be pickled, its code is generated; save state_dict() (the keys are the "
            "original model's) or the original model"
        )

    def deep_copy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        runner.watch(twin, like=self)
        return twin

    members: dict[str, Any] = {
        "_ogc_original": original,
        "forward": forward,
        "__reduce_ex__": lambda self, protocol: refuse_pickling(self),
        "__deepcopy__": deep_copy,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    for name, value in (("plan", plan), ("graph", graph), ("code", runner.generated.source)):
        if hasattr(original, name) or name in vars(model):
            log.warning("the model has an attribute %r of its own; the optimized module's %r is not set", name, name)
        else:
            members[name] = value
    result: torch.nn.Module = object.__new__(type(f"Optimized{original.__name__}", (original,), members))
    object.__setattr__(result, "__dict__", vars(model))
    runner.watch(result, like=model)
    return result

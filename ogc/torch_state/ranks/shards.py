"""Modules whose parameters are spread over ranks, and gathered while the module runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..private import parameters_of


def is_unit(module: torch.nn.Module) -> bool:
    """Whether hooks of the module, those of ``fully_shard``, gather its parameters for its forward and its backward."""
    return isinstance(module, _sharding("FSDPModule"))


def is_wrapper(module: torch.nn.Module) -> bool:
    """Whether the module, a ``FullyShardedDataParallel``, does so for the module in it."""
    return isinstance(module, _sharding("FullyShardedDataParallel"))


def has_units(module: Any) -> bool:
    """Whether something is a module that is such a unit, or has some inside."""
    return isinstance(module, torch.nn.Module) and any(is_unit(one) or is_wrapper(one) for one in module.modules())


def has_inner_units(module: torch.nn.Module) -> bool:
    """Whether there are units inside the module: their parameters are not there while it runs, but while they do."""
    return any(is_wrapper(one) or (is_unit(one) and one is not module) for one in module.modules())


def has_flat_parameters(module: torch.nn.Module) -> bool:
    """Whether what the module computes with are views of one parameter, made anew for each forward."""
    return any(isinstance(parameter, _sharding("FlatParameter")) for parameter in module.parameters())


def _sharding(name: str) -> Any:
    """A class of torch's, or none where nobody has imported it yet."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, ())


def is_spread(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, of which each rank holds a part."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def planned_apart(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The largest trained submodules, by name, of which all parameters are there while they run."""
    for key, child in module.named_children():
        inner = f"{name}.{key}" if name else key
        if has_inner_units(child) or isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from planned_apart(child, inner)
        elif any(parameter.requires_grad for parameter in child.parameters()):
            yield inner, child


@contextmanager
def parameters_apart(model: torch.nn.Module) -> Iterator[None]:
    """Inside, parameters that are views of one of all ranks are parameters of their own, of the same memory.

    Else backwards of single operations would come to that one, whose gradients are handed to other ranks.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    views = [
        (module, name, view)
        for module in modules
        for name, view in parameters_of(module).items()
        if view is not None and view.grad_fn is not None
    ]
    twins = {id(view): torch.nn.Parameter(view.detach()) for _, _, view in views}
    beside = [(module, name) for module, name, _ in views if name in vars(module)]  # as a plain attribute, too
    try:
        for module, name, view in views:
            vars(module).pop(name, None)
            parameters_of(module)[name] = twins[id(view)]
        yield
    finally:
        for module, name, view in views:
            parameters_of(module)[name] = view
        for module, name in beside:
            vars(module)[name] = parameters_of(module)[name]


def own_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of the same memory, put in the places of the model's, until these are put back."""
    twins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                twin = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
                parameters_of(module)[name] = twins.setdefault(parameter, twin)
    return list(twins.values())

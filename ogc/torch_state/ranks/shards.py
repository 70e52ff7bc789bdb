"""Modules whose parameters are spread over ranks, and gathered while the module runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..forwards import only_holds
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


def is_flat(parameter: torch.Tensor) -> bool:
    """Whether a parameter is all of a wrapped module's in one."""
    return isinstance(parameter, _sharding("FlatParameter"))


def has_flat_parameters(module: torch.nn.Module) -> bool:
    """Whether what the module computes with are plain attributes, views of one parameter, made anew in each forward."""
    return any(map(is_flat, module.parameters()))


def views_of_flat(module: torch.nn.Module) -> list[str]:
    """The names of such attributes of one module, where it or one around it has a flat parameter."""
    found = vars(module).items()
    return [name for name, value in found if isinstance(value, torch.Tensor) and value.grad_fn is not None]


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
        if has_inner_units(child) or only_holds(child):
            yield from planned_apart(child, inner)
        elif any(parameter.requires_grad for parameter in child.parameters()):
            yield inner, child


@contextmanager
def parameters_apart(model: torch.nn.Module) -> Iterator[None]:
    """Inside, parameters that are views of one of all ranks are parameters of their own, of the same memory.

    Else backwards of single operations would come to that one, whose gradients are handed to other ranks.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    tables = [(parameters_of(module), name) for module in modules for name in parameters_of(module)]
    views = [(table, name, view) for table, name in tables if (view := table[name]) is not None and view.grad_fn]
    beside = [
        (vars(module), parameters_of(module), name) for module in modules for name in _views_beside(model, module)
    ]
    attributes = [(found, table, name, found[name]) for found, table, name in beside]
    twins = {id(v): torch.nn.Parameter(v.detach()) for v in (*(v for *_, v in views), *(v for *_, v in attributes))}
    known = [(table, dict(table)) for _, table, *_ in attributes]
    try:
        for found, table, name, view in attributes:
            del found[name]
            table[name] = twins[id(view)]
        for table, name, view in views:
            table[name] = twins[id(view)]
        yield
    finally:
        for table, content in known:
            for name in table.keys() - content.keys():
                del table[name]
        for table, name, view in views:
            table[name] = view
        for found, _, name, view in attributes:
            found[name] = view


def _views_beside(model: torch.nn.Module, module: torch.nn.Module) -> list[str]:
    """Views of a flat parameter that are plain attributes of a module of ``model``, instead of parameters or beside."""
    is_flat = has_flat_parameters(model)
    return [name for name in views_of_flat(module) if is_flat or name in parameters_of(module)]


def own_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of the same memory, put in the places of the model's, until these are put back."""
    twins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                twin = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
                parameters_of(module)[name] = twins.setdefault(parameter, twin)
    return list(twins.values())

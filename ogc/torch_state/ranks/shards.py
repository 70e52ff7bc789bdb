"""Modules whose parameters are spread over ranks, and gathered while the module runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch


def is_unit(module: torch.nn.Module) -> bool:
    """Whether hooks of the module, those of ``fully_shard``, gather its parameters for its forward and its backward."""
    sharding = sys.modules.get("torch.distributed.fsdp")
    return sharding is not None and isinstance(module, sharding.FSDPModule)


def has_units(module: torch.nn.Module) -> bool:
    """Whether the module is such a unit, or has some inside."""
    return any(map(is_unit, module.modules()))


def has_inner_units(module: torch.nn.Module) -> bool:
    """Whether there are units inside the module: their parameters are not there while it runs, but while they do."""
    return any(is_unit(one) for one in module.modules() if one is not module)


def planned_apart(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The largest trained submodules, by name, of which all parameters are there while they run."""
    for key, child in module.named_children():
        inner = f"{name}.{key}" if name else key
        if has_inner_units(child) or isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from planned_apart(child, inner)
        elif any(parameter.requires_grad for parameter in child.parameters()):
            yield inner, child

"""Modules that train another one on many devices, and hold it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from ..private import MEMBERS, submodules_of

DataParallel = torch.nn.parallel.DistributedDataParallel


def around(wrapper: DataParallel, module: torch.nn.Module) -> DataParallel:
    """The same wrapper, of the same gradients, around another module that has the same parameters."""
    twin: DataParallel = object.__new__(type(wrapper))
    vars(twin).update(vars(wrapper))
    vars(twin)[MEMBERS[2]] = {**submodules_of(wrapper), "module": module}
    return twin


Optimize = TypeVar("Optimize", bound=Callable[..., torch.nn.Module])


def within_data_parallel(optimize: Optimize) -> Optimize:
    """What optimizes a model, for a DistributedDataParallel too: the model in it."""

    @wraps(optimize)
    def call(model: torch.nn.Module, sample_input: Any, **wish: Any) -> torch.nn.Module:
        if isinstance(model, DataParallel):
            return around(model, optimize(model.module, sample_input, **wish))
        return optimize(model, sample_input, **wish)

    return cast(Optimize, call)

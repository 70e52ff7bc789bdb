"""Modules that train another one on many devices, and hold it."""

from __future__ import annotations

import torch

from ..private import MEMBERS, submodules_of

DataParallel = torch.nn.parallel.DistributedDataParallel


def around(wrapper: DataParallel, module: torch.nn.Module) -> DataParallel:
    """The same wrapper, of the same gradients, around another module that has the same parameters."""
    twin: DataParallel = object.__new__(type(wrapper))
    vars(twin).update(vars(wrapper))
    vars(twin)[MEMBERS[2]] = {**submodules_of(wrapper), "module": module}
    return twin

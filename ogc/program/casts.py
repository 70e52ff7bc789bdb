"""Casts that autocast shares: of a parameter that several operators use in one region, all of them get the same one.

Gradients of all uses are added up at that cast, in its type, and cast back once. A program has its casts as calls;
those that autocast would share, a forward takes from autocast's own cache, so that it shares them with whatever else
runs in the region.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..torch_state.private import base_of, is_view
from .structures import EACH_BY_ITSELF, InputSpec


@contextmanager
def autocast_to(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Inside, autocast is on for a type of device, be it there or not. Its cache stays, unlike after torch.autocast."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def is_shared(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast keeps its casts of a tensor. Source: ``cached_cast`` in aten/src/ATen/autocast_mode.cpp."""
    is_parameter = tensor.is_leaf and tensor.requires_grad and not is_view(tensor)
    return is_parameter and tensor.dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16)


def shares_casts(call: InputSpec) -> bool:
    """Whether a call is made where autocast is on and shares its casts."""
    return bool(call.casts) and EACH_BY_ITSELF not in call.casts


def cast(tensor: torch.Tensor, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
    """The cast that autocast has of a tensor, made now if it has none; autocast may be off meanwhile.

    There is no call for that, but a product with no columns, which it casts, saves the cast.
    """
    if not is_shared(tensor, dtype) or not tensor.dim() or not torch.is_grad_enabled():
        return tensor.to(dtype)
    kind = tensor.device.type
    saved: list[torch.Tensor] = []

    def see(one: torch.Tensor) -> torch.Tensor:
        saved.append(one)
        return one.detach()

    nothing = torch.zeros(tensor.shape[-1], 0, dtype=dtype, device=tensor.device, requires_grad=True)
    with autocast_to(kind, dtype), saved_tensors_hooks(see, lambda one: one):
        torch.matmul(tensor, nothing)
    for one in saved:
        base = base_of(one)
        whole = one if base is None else base
        if whole.shape == tensor.shape and whole.dtype == dtype and whole.requires_grad:
            return whole
    return tensor.to(dtype)

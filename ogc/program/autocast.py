"""Programs and autocast: its casts are calls of the program, so it is off where a program runs.

Of a parameter that several operators use in one region autocast makes one cast, at which their gradients are added up,
in its type. A forward takes such casts from autocast's own cache, and shares them with what else runs in the region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..torch_state.private import (
    base_of,
    enter_saved_tensors_hooks,
    is_any_autocast_enabled,
    is_mapped,
    is_view,
    leave_saved_tensors_hooks,
    set_grad_enabled,
    unmapped,
)
from ..torch_state.settings import Flags, flags, flags_held
from .program import without_autocast
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


def run_saving(
    call: Callable[[], object],
    settings: Flags,
    pack: Callable[[torch.Tensor], Any],
    unpack: Callable[[Any], torch.Tensor],
) -> None:
    """Call it under the settings, with gradients on, autocast and ``vmap`` off; what autograd saves goes to ``pack``.

    Kernels may depend on gradients being on, and without them nothing is saved.
    """
    if is_mapped():
        with unmapped():
            run_saving(call, settings, pack, unpack)
    elif is_any_autocast_enabled() or flags() != settings:
        with without_autocast(), flags_held(settings):
            _run(call, pack, unpack)
    else:
        _run(call, pack, unpack)


def _run(
    call: Callable[[], object], pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> None:
    # What enable_grad() and saved_tensors_hooks() do, in fewer steps: a kernel leaves nothing of Python in the caches,
    # and behind one each step takes ten times as long.
    before = torch.is_grad_enabled()
    set_grad_enabled(True)
    enter_saved_tensors_hooks(pack, unpack)
    try:
        call()
    finally:
        leave_saved_tensors_hooks()
        set_grad_enabled(before)

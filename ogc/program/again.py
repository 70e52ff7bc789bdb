"""Running a part of a program again, in the backward, under what its forward ran under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_state.flags import Flags, flags, flags_held
from ..torch_state.private import (
    enter_saved_tensors_hooks,
    is_any_autocast_enabled,
    is_mapped,
    leave_saved_tensors_hooks,
    set_grad_enabled,
    unmapped,
)
from .program import without_autocast


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

"""Whose gradient it is: a backward may write over what it is given, where nobody else holds that."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..on_thread import OnThread
from ..torch_state.private import base_of, is_batched, storage_holders, tensor_holders

log = logging.getLogger(__name__)

REPEATS = 3
"""How often the holders of a gradient are counted before the counts are believed."""


def is_ours(gradient: torch.Tensor) -> bool:
    """Whether the gradient covers its storage once and nobody but the calling backward holds either.

    Call it before anything else in a backward: it compares with the reference counts of a gradient that
    nobody else holds, at that place. They differ between releases of PyTorch and Python, so they are looked up. A
    gradient that came through a view, such as that of a linear layer on more than two dimensions, has a base
    that only it holds.
    """
    holders = _holders(gradient)
    return bool(holders) and holders in (_here.value or holders_when_ours())


def is_pytorchs(gradient: torch.Tensor) -> bool:
    """Whether a backward has to be by PyTorch's own operators: it is differentiated, or for many gradients at once."""
    return torch.is_grad_enabled() or is_batched(gradient)


def _holders(gradient: torch.Tensor) -> tuple[int, ...]:
    base = base_of(gradient)
    whole = gradient.is_contiguous() and (base is None or base.numel() == gradient.numel())
    if type(gradient) is not torch.Tensor or not whole or is_batched(gradient):
        return ()
    holders = sys.getrefcount(gradient), tensor_holders(gradient), storage_holders(gradient)
    return holders if base is None else (*holders, sys.getrefcount(base), tensor_holders(base))


_when_ours: set[tuple[int, ...]] = set()
_here: OnThread[set[tuple[int, ...]] | None] = OnThread(None)


def counted_here() -> AbstractContextManager[None]:
    """Inside, holders on this thread are those that are counted now, under torch's modes, which are holders, too."""
    return _here.set_to(_holders_in_backward())


def holders_when_ours() -> set[tuple[int, ...]]:
    """The counts of a gradient that is no view, and of one that is; none as long as others hold whatever there is.

    They are counted in a thread of its own, out of sight of tracers and torch's modes, which are each thread's, and
    believed where each time gives the same and all of it is gone afterwards: nobody else was among the holders.
    """
    if not _when_ours:
        found: list[set[tuple[int, ...]]] = []
        thread = threading.Thread(target=_count_holders, args=(found,), daemon=True)
        thread.start()
        thread.join()
        if len(found) == REPEATS and all(counts == found[0] for counts in found):
            _when_ours.update(found[0])
        if not _when_ours:
            log.warning("gradients are not written over others: something holds what autograd makes, as tracers may")
    return _when_ours


def _count_holders(found: list[set[tuple[int, ...]]]) -> None:
    sys.settrace(None)  # debuggers set one for each new thread
    sys.setprofile(None)
    for _ in range(REPEATS):
        found.append(_holders_in_backward())


def _holders_in_backward() -> set[tuple[int, ...]]:
    """The counts of fresh gradients; none if somebody holds one of them afterwards."""
    counts: set[tuple[int, ...]] = set()
    gone: list[Callable[[], bool]] = []

    def look(gradient: torch.Tensor) -> None:
        counts.add(_holders(gradient))
        held = [weakref.ref(t) for t in (gradient, base_of(gradient), gradient.untyped_storage()) if t is not None]
        gone.append(lambda: all(one() is None for one in held))

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            look(gradient)
            return gradient.clone()

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad((Probe.apply(x * 2) * 3).sum(), x)
    torch.autograd.grad((Probe.apply(x * 2).view(2, 1) * 3).sum(), x)
    return counts if all(is_gone() for is_gone in gone) else set()

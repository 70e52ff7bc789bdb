"""Hooks for saved tensors, off for now: transforms of torch.func that differentiate take none and save past them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .private import enter_saved_tensors_hooks, leave_saved_tensors_hooks, saved_tensors_hooks_in_use

TAKES_NONE = "disable_saved_tensors_hooks"
"""The function of torch.autograd.graph inside of whose context such a transform runs."""


@contextmanager
def hooks_off() -> Iterator[None]:
    """What is saved inside, on this thread, goes to no hooks."""
    hooks = []
    while (found := saved_tensors_hooks_in_use()) is not None:
        leave_saved_tensors_hooks()
        hooks.append(found)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            enter_saved_tensors_hooks(pack, unpack)


@contextmanager
def hooks_off_in(known: Callable[..., AbstractContextManager[None]], *args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of ``TAKES_NONE``: its context, which hooks would refuse."""
    with hooks_off(), known(*args, **kwargs):
        yield

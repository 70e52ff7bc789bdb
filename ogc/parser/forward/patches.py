"""Patches of torch's own functions while a forward is recorded or judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.utils.checkpoint

from ...torch_state.dispatch import out_of_mode
from ...torch_state.no_trace import unwatched
from ...torch_state.private import CHECKPOINTS
from .flat import Pack, saved_until_done

CONTENT = ("tolist", "numpy", "__array__", "__dlpack__")
"""Methods of tensors by which Python gets hold of what they hold."""

TEXT = ("__repr__", "__format__")
"""Methods that turn tensors into text, for messages: nothing that a forward computes comes of it."""


def checkpoint_nothing(stack: ExitStack) -> None:
    """Let ``torch.utils.checkpoint`` save as without it, unless it is reentrant: its forward is planned like any."""

    def generator(known: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    for name in CHECKPOINTS:
        if hasattr(torch.utils.checkpoint, name):  # which of them is called depends on torch's version
            wrap(stack, torch.utils.checkpoint, name, generator)


def wrap(stack: ExitStack, owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Put ``call(known, *args, **kwargs)`` in the place of a function of ``owner`` until ``stack`` is closed."""

    def wrapped(known: Any) -> Any:
        return wraps(known)(lambda *args, **kwargs: call(known, *args, **kwargs))

    replace(stack, owner, name, wrapped)


def replace(stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put what ``make`` returns for an attribute of a class or module in its place until ``stack`` is closed."""
    own = vars(owner).get(name)
    known = own if own is not None else next(vars(kind)[name] for kind in owner.__mro__ if name in vars(kind))
    if own is None:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, own)
    setattr(owner, name, make(known))


@contextmanager
def seen_as_recorded(
    model: torch.nn.Module, leaves: Collection[str], told: Pack, paused: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """A forward that nobody records is seen as a recorder would see it.

    Args:
        leaves: names of submodules, which have what they save as long as they run, whatever else is saved.
        told: called with each tensor that leaves save.
        paused: entered while tensors become text, or Python gets hold of their content or their ``.data``.
    """
    modules = {model.get_submodule(name) for name in leaves}

    def in_leaves(call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module in modules and module in unwatched:
            with paused(), out_of_mode(), saved_until_done():
                return call(module, *args, **kwargs)
        with saved_until_done(told) if module in modules else nullcontext():
            return call(module, *args, **kwargs)

    def aside(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with paused():
            return method(*args, **kwargs)

    with ExitStack() as stack:
        if modules:
            wrap(stack, torch.nn.Module, "__call__", in_leaves)
        checkpoint_nothing(stack)
        for name in (*CONTENT, *TEXT):
            wrap(stack, torch.Tensor, name, aside)
        replace(stack, torch.Tensor, "data", lambda data: property(partial(aside, data.__get__), data.__set__))
        yield

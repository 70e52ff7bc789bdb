"""Patches of torch's own functions while a forward is recorded or verified."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.utils.checkpoint

from ...program.opaque import OpaqueCall
from ...torch_state.dispatch import out_of_mode
from ...torch_state.forwards import hooks_off
from ...torch_state.no_trace import unwatched
from ...torch_state.private import CHECKPOINTS, is_functorch_active, version_of
from .flat import Pack, saved_until_done

log = logging.getLogger(__name__)

CONTENT = ("tolist", "numpy", "__array__", "__dlpack__")
"""Methods of tensors by which Python gets hold of what they hold."""

TEXT = ("__repr__", "__format__")
"""Methods that turn tensors into text, for messages: nothing that a forward computes comes of it."""


_told: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def checkpoint_nothing(stack: ExitStack, model: torch.nn.Module | None = None) -> None:
    """Let ``torch.utils.checkpoint`` save as without it, unless it is reentrant: its forward is planned like any.

    Buffers that are written in it, such as running statistics, are written once per step then: of a ``model`` that is
    given, the log says so once.
    """

    def generator(known: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        buffers = [] if model is None or model in _told else list(model.named_buffers())
        before = [version_of(buffer) for _, buffer in buffers]
        yield
        names = [name for (name, buffer), then in zip(buffers, before, strict=True) if version_of(buffer) != then]
        if names and model is not None:
            _told.add(model)
            log.warning(
                "%s is written in torch.utils.checkpoint, whose second forward writes it once more in the plain model: "
                "what is planned writes it once per step, as without checkpoint",
                names[0],
            )

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
    model: torch.nn.Module,
    graph: torch.fx.Graph,
    told: Pack = id,
    paused: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """A forward that nobody records is seen as a recorder would see it.

    Args:
        graph: the program; its opaque modules have what they save as long as they run, whatever else is saved.
        told: called with each tensor that opaque modules save.
        paused: entered while tensors become text, or Python gets hold of their content or their ``.data``.
    """
    opaque = [node.target for node in graph.nodes if isinstance(node.target, OpaqueCall)]
    modules = {one.function or model.get_submodule(one.module): one.takes_no_hooks for one in opaque}

    @contextmanager
    def saving(called: Any) -> Iterator[None]:
        with saved_until_done(told), hooks_off() if modules[called] else nullcontext():
            yield

    def in_leaves(call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module in modules and module in unwatched:
            with paused(), out_of_mode(), saved_until_done():
                return call(module, *args, **kwargs)
        with saving(module) if module in modules else nullcontext():
            return call(module, *args, **kwargs)

    def in_functions(known: Any) -> Any:
        def apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            with saving(kind) if kind in modules and not is_functorch_active() else nullcontext():
                return known.__get__(None, kind)(*args, **kwargs)

        return classmethod(apply)

    def aside(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with paused():
            return method(*args, **kwargs)

    with ExitStack() as stack:
        if modules:
            wrap(stack, torch.nn.Module, "__call__", in_leaves)
        if any(one.function for one in opaque):
            replace(stack, torch.autograd.Function, "apply", in_functions)
        checkpoint_nothing(stack)
        for name in (*CONTENT, *TEXT):
            wrap(stack, torch.Tensor, name, aside)
        replace(stack, torch.Tensor, "data", lambda data: property(partial(aside, data.__get__), data.__set__))
        yield

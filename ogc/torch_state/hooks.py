"""What runs with a module besides its own forward: hooks, and compiled code in its place.

``transformers`` collects hidden states and attentions with hooks that it registers for good: a forward that was asked
for them makes a collector, the hooks add to it while it runs, and it returns what was collected. Without a collector
they do nothing. Where the collector comes and goes within the recorded forward, all that they do is in the program.
Other hooks may do anything, so these are told by name.

Hooks for saved tensors are off where torch.func differentiates, which takes none, and saves past them. Around a
forward such hooks may change what is saved, and a mode may have functions of torch do something else. Neither is in a
program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from .private import (
    CALL,
    COMPILED,
    DeviceContext,
    always_called_of,
    count_dispatch_modes,
    count_function_modes,
    dispatch_modes,
    enter_saved_tensors_hooks,
    function_modes,
    hooks_of,
    leave_saved_tensors_hooks,
    pop_function_mode,
    push_function_mode,
    saved_tensors_hooks_in_use,
    submodules_of,
)

Told = Callable[[str, str], object]

_MODULE = "transformers.utils.output_capturing"
_NAMES = {f"install_output_{verb}_hook.<locals>.output_capturing_hook" for verb in ("capuring", "capturing")}


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of the module run compiled code."""
    compiled = getattr(module, CALL)  # or a part of a model that is planned in parts
    return COMPILED in submodules_of(module) or not (compiled is None or hasattr(compiled, "part_of"))


MODE = "a TorchFunctionMode is on, which may have functions of torch do something else"
DISPATCH = (
    "a TorchDispatchMode is on, which may have operators do something else; if it only looks, give it only_looks = True"
)
SAVED = "hooks for saved tensors are on, which may give the backward something else than was saved"


def what_is_around() -> str:
    """What the caller has put around the forward that may change what it gives, in words; "" if nothing."""
    if count_function_modes() and any(type(mode) is not DeviceContext for mode in function_modes()):
        return MODE
    if count_dispatch_modes() and not all(map(_only_looks, dispatch_modes())):
        return DISPATCH
    hooks = saved_tensors_hooks_in_use()
    return "" if hooks is None or all(map(_is_known, hooks)) else SAVED


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Inside, no mode has functions of torch do something else, but for a default device."""
    modes = [pop_function_mode() for _ in function_modes()]
    for mode in reversed(modes):
        if type(mode) is DeviceContext:
            push_function_mode(mode)
    try:
        yield
    finally:
        for _ in function_modes():
            pop_function_mode()
        for mode in reversed(modes):
            push_function_mode(mode)


def _only_looks(mode: Any) -> bool:
    return _is_known(type(mode)) or getattr(mode, "only_looks", False)


def _is_known(thing: Any) -> bool:
    """Whether it is PyTorch's own, of which none changes values, or ours."""
    return getattr(thing, "__module__", "").partition(".")[0] in ("torch", __name__.partition(".")[0])


def only_collects(module: torch.nn.Module) -> bool:
    """Whether all hooks of a module, if any, collect for the forward around it, and no collector is waiting now."""
    hooks, *others = hooks_of(module)
    has_others = any(others) or always_called_of(module)
    return not has_others and all(_collects(hook) and _collector(hook) is None for hook in hooks.values())


@contextmanager
def collectors_watched(model: torch.nn.Module, told: Told) -> Iterator[None]:
    """``told(module, why)`` is called where collecting hooks of submodules run without a collector."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            hooks, *_ = hooks_of(module)
            for key, hook in hooks.items():
                if name and _collects(hook):
                    stack.callback(hooks.__setitem__, key, hook)
                    hooks[key] = _watched(hook, name, told)
        yield


def _watched(hook: Callable[..., Any], name: str, told: Told) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if _collector(hook) is None:
            told(name, "has hooks for a forward around it")
        return hook(*args)

    return call


def _collects(hook: Any) -> bool:
    named = getattr(hook, "__module__", "") == _MODULE and getattr(hook, "__qualname__", "") in _NAMES
    return named and hasattr(hook.__globals__.get("_active_collector"), "get")


def _collector(hook: Any) -> Any:
    return hook.__globals__["_active_collector"].get()


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

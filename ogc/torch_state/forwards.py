"""What runs when a module is called: its plain forward or another one, hooks, compiled code, modes around it.

``transformers`` collects hidden states and attentions with hooks that it registers for good: they add to a collector
that a forward makes when it is asked for these, and do nothing without one. A collector that comes and goes within the
recorded forward is part of the program. Other hooks may do anything, so these are told by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
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
    untraced,
)

ORIGINAL = "_ogc_original"
"""The attribute of an optimized module's class that holds the class whose forward is the plain one."""

REPLACED = "_ogc_forward"
"""The slot of an optimized module that holds what was assigned to its ``forward``."""

COMPILED_CALL = "_ogc_call"
"""The slot of an optimized module that holds what ``compile()`` makes of its call."""

OWN = "_ogc_own"
"""The name by which its class has the forward as a method; torch.compile cannot trace one that is bound by hand."""


def original_class(model: torch.nn.Module) -> type[torch.nn.Module]:
    """The class whose forward is the plain one: an optimized module may be optimized again."""
    found: type[torch.nn.Module] = getattr(type(model), ORIGINAL, type(model))
    return found


def only_holds(module: torch.nn.Module) -> bool:
    """Whether a module is never called, as it has no forward: a list or dict of others that adds none."""
    return "forward" not in vars(module) and original_class(module).forward is torch.nn.Module.forward


def plain_forward(model: torch.nn.Module) -> Callable[..., Any]:
    """The forward that was optimized, also where it was assigned to the plain model; of other modules their own."""
    assigned: Callable[..., Any] | None = vars(model).get("forward")
    return partial(original_class(model).forward, model) if assigned is None else assigned


def is_as_assigned(model: torch.nn.Module, assigned: Callable[..., Any] | None) -> bool:
    """Whether the plain model's forward is still this one, or its copy for another instance; None: its class's."""
    now = vars(model).get("forward")
    if isinstance(now, MethodType) and isinstance(assigned, MethodType):
        return now.__func__ is assigned.__func__
    return now is assigned


class OwnForward:
    """The forward of an optimized module, as an attribute of its class.

    An optimized module shares the plain one's attributes. A forward that is assigned to it, such as one wrapped for
    mixed precision, is kept apart from these. The signature is that of the forward of ``like``.
    """

    def __init__(self, function: Callable[..., Any], like: torch.nn.Module) -> None:
        self.function = function
        if "forward" not in vars(like):
            function.__wrapped__ = original_class(like).forward  # type: ignore[attr-defined]
        elif not hasattr(function, "__signature__"):
            signature = inspect.signature(plain_forward(like))
            own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            parameters = [own, *signature.parameters.values()]
            function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]

    @untraced
    def __get__(self, module: torch.nn.Module | None, owner: type) -> Callable[..., Any]:
        if module is None:
            return self.function
        replaced = getattr(module, REPLACED, None)
        return getattr(module, OWN) if replaced is None else replaced

    def __set__(self, module: torch.nn.Module, replacement: Callable[..., Any] | None) -> None:
        object.__setattr__(module, REPLACED, replacement)

    def __delete__(self, module: torch.nn.Module) -> None:
        if getattr(module, REPLACED, None) is None:
            raise AttributeError("forward")
        object.__setattr__(module, REPLACED, None)


class OwnCall:
    """What an optimized module calls in the place of its own call, as an attribute of its class.

    Its attributes, shared with the plain model, may hold compiled code of that one. ``follow`` gives what is called
    where another forward was assigned; None for the module's own call.
    """

    def __init__(self, follow: Callable[[torch.nn.Module], Callable[..., Any] | None]) -> None:
        self.follow = follow

    @untraced
    def __get__(self, module: torch.nn.Module | None, owner: type) -> Callable[..., Any] | None:
        if module is None:
            return None
        compiled: Callable[..., Any] | None = getattr(module, COMPILED_CALL, None)
        shared = vars(module).get(CALL)
        if compiled is None and getattr(module, REPLACED, None) is not None:
            compiled = self.follow(module)
        return shared if compiled is None and calls_part(shared, module) else compiled

    def __set__(self, module: torch.nn.Module, compiled: Callable[..., Any] | None) -> None:
        object.__setattr__(module, COMPILED_CALL, compiled)


def calls_part(call: Any, module: torch.nn.Module) -> bool:
    """Whether a call stands in a module, for an optimized model that has planned the module as one of its parts."""
    return hasattr(call, "part_of") and call.module() is module


# -- hooks, and modes around a forward -------------------------------------------------------------------


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
    if count_dispatch_modes() and not all(
        _is_known(type(mode)) or getattr(mode, "only_looks", False) for mode in dispatch_modes()
    ):
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


def _is_known(thing: Any) -> bool:
    """Whether it is PyTorch's own, of which none changes values, or ours."""
    return getattr(thing, "__module__", "").partition(".")[0] in ("torch", __name__.partition(".")[0])


def only_collects(module: torch.nn.Module) -> bool:
    """Whether all hooks of a module, if any, collect for the forward around it, and no collector is waiting now."""
    hooks, *others = hooks_of(module)
    has_others = any(others) or always_called_of(module)
    return not has_others and all(_collects(hook) and _collector(hook) is None for hook in hooks.values())


def collects_now(module: torch.nn.Module) -> bool:
    """Whether hooks of a module collect for a forward around it that is running: they are not to be called besides."""
    return any(_collects(hook) and _collector(hook) is not None for hook in hooks_of(module)[0].values())


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

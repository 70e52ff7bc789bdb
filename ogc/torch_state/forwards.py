"""Which forward of a module is the plain one, and one that may be replaced without replacing that."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch

from .private import CALL, untraced

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
    """The forward that was optimized, whatever was wrapped around the optimized one since; of others their own.

    It may be one that was assigned to the plain model, such as one wrapped for mixed precision.
    """
    assigned: Callable[..., Any] | None = vars(model).get("forward")
    return partial(original_class(model).forward, model) if assigned is None else assigned


def is_as_assigned(model: torch.nn.Module, assigned: Callable[..., Any] | None) -> bool:
    """Whether the plain model's forward is still this one, or its copy for another instance; None: its class's."""
    now = vars(model).get("forward")
    if isinstance(now, MethodType) and isinstance(assigned, MethodType):
        return now.__func__ is assigned.__func__
    return now is assigned


class OwnForward:
    """The forward of an optimized module as an attribute of its class.

    An optimized module has the attributes of the plain one, the same dict. A forward that is assigned to it, such as
    one wrapped for mixed precision, is kept apart from these: it is not the plain model's. It has the signature
    of the forward of ``like``, unless it has one of its own.
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

    The attributes that it shares with the plain model may hold compiled code of that one.

    Args:
        follow: gives what is called where another forward was assigned; None for the module's own call.
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

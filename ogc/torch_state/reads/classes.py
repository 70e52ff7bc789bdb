"""Classes whose instances tell of each attribute that Python reads from them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from logging import Logger, LoggerAdapter
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from .owners import slots_of

Told = Callable[[Any, str, FrameType], None]
"""Is given an object, the name of an attribute and who reads or sets it."""

NOT_FOLLOWED = frozenset({*sys.stdlib_module_names, "numpy", "ogc", "torch"} - {"__main__"})
"""Packages whose globals and classes decide nothing that changes."""


def is_followed(name: Any) -> bool:
    """Whether what Python reads of a Python module, or in it, may change what a forward computes."""
    return not str(name).startswith("namedtuple_") and str(name).partition(".")[0] not in NOT_FOLLOWED


class ObservedClasses:
    """Classes of which each read and each assignment of an attribute is told, until :meth:`restore`.

    ``__getattribute__`` and ``__setattr__`` are put into the class, or into that of its bases which has its own. The
    class stays what it is.

    Args:
        read: told before an attribute is read.
        assigned: told before one is set.
    """

    def __init__(self, read: Told, assigned: Told) -> None:
        self.told = {"__getattribute__": read, "__setattr__": assigned}
        self._known: dict[tuple[type, str], bool] = {}
        self._restore: list[Callable[[], None]] = []
        self._of_modules: type[ModuleType] | None = None

    def observe(self, thing: Any) -> bool:
        """Observe the class of an object; whether that can be done."""
        if type(thing) is not ModuleType:
            return all(self._put(type(thing), name) for name in self.told)
        if self._of_modules is None:
            self._of_modules = type(
                "module", (ModuleType,), {name: self._telling(ModuleType, name) for name in self.told}
            )
        thing.__class__ = self._of_modules
        self._restore.append(lambda: setattr(thing, "__class__", ModuleType))
        return True

    def restore(self) -> None:
        """Let all classes be as before; they may be observed again."""
        while self._restore:
            self._restore.pop()()
        self._known.clear()

    def _put(self, kind: type, name: str) -> bool:
        if (kind, name) in self._known:
            return self._known[kind, name]
        owner = next(one for one in kind.__mro__ if name in vars(one))
        is_own = isinstance(vars(owner)[name], FunctionType)
        target = owner if is_own else torch.nn.Module if issubclass(kind, torch.nn.Module) else kind
        if (target, name) not in self._known:
            self._known[target, name] = self._replace(target, name)
        self._known[kind, name] = self._known[target, name]
        return self._known[kind, name]

    def _replace(self, target: type, name: str) -> bool:
        before = vars(target).get(name)
        try:
            setattr(target, name, self._telling(target, name))
        except TypeError:  # a class that is written in C
            return False
        if before is None:
            self._restore.append(lambda: delattr(target, name))
        else:
            self._restore.append(lambda: setattr(target, name, before))
        return True

    def _telling(self, kind: type, name: str) -> Callable[..., Any]:
        do: Callable[..., Any] = getattr(kind, name)
        told, frame_of = self.told[name], sys._getframe

        def telling(self: Any, name: str, *value: Any) -> Any:
            told(self, name, frame_of(1))
            return do(self, name, *value)

        return telling


SERVICES = (Logger, LoggerAdapter)


def can_be_observed(thing: Any) -> bool:
    """Whether an object is one of those whose attributes may decide what a forward computes."""
    kind = type(thing)
    if isinstance(thing, ModuleType):
        return is_followed(thing.__name__)
    if isinstance(thing, torch.nn.Module):
        return True
    is_torchs = kind.__module__.partition(".")[0] in ("torch", "ogc")
    has_names = kind.__dictoffset__ != 0 or any(slots_of(kind))
    return has_names and not is_torchs and not isinstance(thing, (*SERVICES, torch.Tensor, type))

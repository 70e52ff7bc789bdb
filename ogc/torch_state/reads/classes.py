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
"""Is given the object, the name and who reads it, before the attribute is found."""

NOT_FOLLOWED = frozenset({*sys.stdlib_module_names, "numpy", "ogc", "torch"} - {"__main__"})
"""Packages whose globals and classes decide nothing that changes."""


def is_followed(name: Any) -> bool:
    """Whether what Python reads of a Python module, or in it, may change what a forward computes."""
    return not str(name).startswith("namedtuple_") and str(name).partition(".")[0] not in NOT_FOLLOWED


class ObservedClasses:
    """Classes that are observed until :meth:`restore`.

    An attribute ``__getattribute__`` is put into the class, or into that of its bases which has one of its own. The
    class stays what it is.
    """

    def __init__(self, told: Told) -> None:
        self.told = told
        self._known: dict[type, bool] = {}
        self._restore: list[Callable[[], None]] = []
        self._of_modules: type[ModuleType] | None = None

    def observe(self, thing: Any) -> bool:
        """Observe the class of an object; whether that can be done."""
        kind = type(thing)
        if kind is ModuleType:
            thing.__class__ = self._module_class()
            self._restore.append(lambda: setattr(thing, "__class__", ModuleType))
            return True
        if kind not in self._known:
            self._known[kind] = self._put(kind)
        return self._known[kind]

    def restore(self) -> None:
        """Let all classes be as before; they may be observed again."""
        while self._restore:
            self._restore.pop()()
        self._known.clear()

    def _module_class(self) -> type[ModuleType]:
        if self._of_modules is None:
            self._of_modules = type("module", (ModuleType,), {"__getattribute__": self._telling(ModuleType)})
        return self._of_modules

    def _put(self, kind: type) -> bool:
        owner = next(one for one in kind.__mro__ if "__getattribute__" in vars(one))
        is_own = isinstance(vars(owner)["__getattribute__"], FunctionType)
        target = owner if is_own else torch.nn.Module if issubclass(kind, torch.nn.Module) else kind
        if target in self._known:
            return self._known[target]
        before = vars(target).get("__getattribute__")
        try:
            setattr(target, "__getattribute__", self._telling(target))  # noqa: B010
        except TypeError:  # a class that is written in C
            self._known[target] = False
            return False
        self._known[target] = True
        if before is None:
            self._restore.append(lambda: delattr(target, "__getattribute__"))
        else:
            self._restore.append(lambda: setattr(target, "__getattribute__", before))
        return True

    def _telling(self, kind: type) -> Callable[[Any, str], Any]:
        find: Any = kind.__getattribute__
        told, frame_of = self.told, sys._getframe

        def telling(self: Any, name: str) -> Any:
            told(self, name, frame_of(1))
            return find(self, name)

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

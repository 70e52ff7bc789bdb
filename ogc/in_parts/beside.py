"""What training calls of an optimized model beside its forward: submodules, each planned with its first call.

Trainers put a forward of their own in the place of the model's, and people call other methods, or a submodule. What is
called below is planned then, by the goal of the model. A run of an optimized model takes care of all that is in it, and
so does one of the plain model, which shares its submodules.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from threading import RLock
from typing import Any

import torch

from ..runtime.calls import REACH, Calls, Reach, Report, beside
from ..runtime.module import OWN_REPORT
from ..runtime.runner import UNDER_HOOKS, tell_plain
from ..runtime.when_called import PlansCalls, planned_when_called
from ..torch_state.forwards import ORIGINAL, is_compiled, only_holds, original_class
from ..torch_state.private import (
    REPLICATE,
    current_backward,
    has_global_hooks,
    hooks_of,
    own_call,
    saved_tensors_hooks_in_use,
)
from .module import behind_hooks, install

PlanningOf = Callable[[str, torch.nn.Module, bool], PlansCalls]
"""What plans a submodule, by its name; it is one of many where several of a container are called in turn."""


class Beside:
    """Calls of an optimized model's submodules that no run of it makes.

    Args:
        model: the plain model. Its own runs make none of these calls.
        planning_of: what plans them.
        reach: knows whether anything has run by a plan.
    """

    def __init__(self, model: torch.nn.Module, planning_of: PlanningOf, reach: Reach) -> None:
        self.model, self.planning_of, self.reach = model, planning_of, reach
        self.members = {id(module): (name, module, is_one) for name, module, is_one in called_apart(model)}
        self.planned: dict[int, torch.nn.Module] = {}
        self.plain: Counter[tuple[str, str]] = Counter()
        self.told: set[str] = set()
        self.lock = RLock()
        self.uninstall = install(self, [model, *(module for _, module, _ in self.members.values())])

    def has(self, module: torch.nn.Module) -> bool:
        """Whether a module is one of these, not the plain model."""
        return id(module) in self.members

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a submodule, hooks and all, or the plain model."""
        if not self.has(module):  # it is the plain model
            with beside.set_to(False):
                return own_call(module)(*args, **kwargs)
        name, *_ = self.members[id(module)]
        is_hooked = any(hooks_of(module)) or has_global_hooks()
        if not module.training or current_backward() != -1 or (is_hooked and "forward" in vars(module)):
            return own_call(module)(*args, **kwargs)
        if saved_tensors_hooks_in_use() is not None:
            self.plain[name, UNDER_HOOKS] += 1
            tell_plain(UNDER_HOOKS, self.told)
            return own_call(module)(*args, **kwargs)
        planned: Any = self._planned(module)
        if is_hooked:
            result = behind_hooks(module, planned.forward, args, kwargs)
        else:
            result = own_call(planned)(*args, **kwargs)
        self.reach.is_reached = self.reach.is_reached or _report_of(planned).planned > 0
        return result

    def _planned(self, module: torch.nn.Module) -> torch.nn.Module:
        """What runs a submodule, planned at its first call."""
        with self.lock:
            if id(module) not in self.planned:
                planning = self.planning_of(*self.members[id(module)])
                self.planned[id(module)] = planned_when_called(module, planning)
            return self.planned[id(module)]

    def report(self) -> tuple[Calls, ...]:
        """The calls until now."""
        names = ((self.members[key][0], planned) for key, planned in self.planned.items())
        planned = (_report_of(one).of(name).calls for name, one in names)
        plain = (Calls("", f"plain: {why}", count, name) for (name, why), count in self.plain.items())
        return (*chain.from_iterable(planned), *plain)


def called_apart(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """Submodules that may be called by themselves, by name, and whether each is one of many: children, and members of
    containers that are never called. A plan of a single layer of PyTorch's would save nothing.
    """

    def below(module: torch.nn.Module, prefix: str, is_one: bool) -> Iterator[tuple[str, torch.nn.Module, bool]]:
        for name, child in module.named_children():
            if only_holds(child):
                yield from below(child, f"{prefix}{name}.", True)
            elif not is_compiled(child) and not isinstance(child, torch.jit.ScriptModule) and not _is_layer(child):
                yield f"{prefix}{name}", child, is_one

    return below(model, "", False)


def _report_of(planned: torch.nn.Module) -> Report:
    found: Report = getattr(type(planned), OWN_REPORT)(planned)
    return found


def _is_layer(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def with_calls_beside(optimized: torch.nn.Module, model: torch.nn.Module, planning_of: PlanningOf) -> torch.nn.Module:
    """The optimized model, such that its submodules are planned where they are called by themselves."""
    kind: Any = type(optimized)
    own_copy, reach = kind.__deepcopy__, getattr(kind, REACH)
    of: weakref.WeakKeyDictionary[torch.nn.Module, Beside] = weakref.WeakKeyDictionary()

    def deep_copy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        made: torch.nn.Module = own_copy(self, memo)
        of[made] = Beside(plain_of(made), planning_of, reach)
        return made

    def replicated(self: torch.nn.Module) -> Any:
        if self in of:
            of[self].uninstall()  # or the replicas' submodules would call those of this one
        return getattr(original_class(self), REPLICATE)(self)

    kind.__deepcopy__ = deep_copy
    if REPLICATE not in vars(kind):
        setattr(kind, REPLICATE, replicated)
    reach.more = lambda module: of[module].report() if module in of else ()
    of[optimized] = Beside(plain_of(model), planning_of, reach)
    return optimized


def plain_of(model: torch.nn.Module) -> torch.nn.Module:
    """A model itself, or of one that was optimized or has a loss behind it, an instance of the class without that."""
    kind = next(k for k in type(model).__mro__ if issubclass(k, torch.nn.Module) and not hasattr(k, ORIGINAL))
    if kind is type(model):
        return model
    plain: torch.nn.Module = object.__new__(kind)
    object.__setattr__(plain, "__dict__", vars(model))
    return plain

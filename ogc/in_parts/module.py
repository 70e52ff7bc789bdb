"""Runs a model whose parts are planned one by one, and whose own forward is Python as ever.

Each part is called by its parent, which knows nothing of plans. So the part's module gets something to call in the
place of its own call (``torch.nn.Module`` looks for that first, and leaves it out of copies and pickles), which looks
whether an optimized model that has planned this part is running in this thread. Only then the planned copy runs, an
instance that shares everything with the part. In any other case the part is called as it is.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch

from ..errors import InputError
from ..graph import Graph
from ..plan.plan import Plan
from ..program.structures import Call
from ..runtime.calls import Calls, Report, beside
from ..runtime.module import copied, instance_around, kept_from_compiling, planned_forward
from ..runtime.runner import COSTS_THE_SAVING, UNDER_HOOKS, Modes, Planner, Runner, log, plain_because, tell_plain
from ..torch_state.forwards import original_class
from ..torch_state.no_trace import is_plain, plainly
from ..torch_state.private import (
    CALL,
    REPLICATE,
    has_global_hooks,
    hooks_of,
    ignored_by_scripts,
    own_call,
    saved_tensors_hooks_in_use,
)

PlanLate = Callable[[torch.nn.Module, str, Call], tuple[Graph, Plan, Planner | None]]
"""Plans a call of a submodule, which has a name, the first time; gives what plans other calls of it, too."""


class PlannedPart:
    """A part, the module that runs it planned, and its plans."""

    def __init__(self, module: torch.nn.Module, planned: torch.nn.Module, runner: Runner) -> None:
        self.module = module
        self.planned = planned
        self.runner = runner

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the part, hooks and all."""
        if not any(hooks_of(self.module)) and not has_global_hooks():
            return own_call(self.planned)(*args, **kwargs)
        return behind_hooks(self.module, self.planned.forward, args, kwargs)


def behind_hooks(
    module: torch.nn.Module, planned: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a part with ``planned`` in the place of its forward.

    Hooks are given the module that they are called for: that must be the part itself.
    """
    attributes, thread = vars(module), threading.get_ident()

    def forward(*given: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return original_class(module).forward(module, *given, **named)
        attributes.pop("forward", None)
        return planned(*given, **named)

    attributes["forward"] = forward
    try:
        return own_call(module)(*args, **kwargs)
    finally:
        attributes.pop("forward", None)


def planned_part_of(
    module: torch.nn.Module, plans: Sequence[tuple[Graph, Plan]], planner: Planner | None
) -> PlannedPart:
    """The planned copy of a part; the first plan is that of its sample, the others are for other kinds of calls.

    Raises:
        InputError: the forward of the part was replaced on the instance.
    """
    runner = Runner(module, *plans[0], planner)
    for graph, plan in plans[1:]:
        runner.add(module, graph, plan)
    return _planned_part(module, runner)


def _planned_part(module: torch.nn.Module, runner: Runner, like: torch.nn.Module | None = None) -> PlannedPart:
    name = f"Planned{original_class(module).__name__}"
    planned = instance_around(module, name, {"forward": planned_forward(runner)}, {})
    runner.watch(planned, like=like or module)
    return PlannedPart(module, planned, runner)


class Parts:
    """The planned parts of one optimized model.

    Args:
        members: the parts.
        late: by name, submodules that are planned when they are first called.
        plan_late: plans those.
    """

    def __init__(
        self, members: Sequence[PlannedPart], late: Mapping[str, torch.nn.Module], plan_late: PlanLate
    ) -> None:
        self.members = {
            id(member.module): member for member in members
        }  # which keep the modules, and with them the numbers
        self.late = {id(module): (name, module) for name, module in late.items()}
        self.plan_late = plan_late
        self.lock = threading.RLock()
        self.uninstall: Callable[[], object] = lambda: None
        self.run_part: Callable[[PlannedPart, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.told: set[str] = set()  # one for all parts
        for member in members:
            member.runner.told = self.told

    def install(self) -> None:
        """Have the calls of the parts look here, until ``uninstall()`` or as long as this lives."""
        modules = [member.module for member in self.members.values()]
        self.uninstall = install(self, [*modules, *(module for _, module in self.late.values())])

    def copy(self, memo: Mapping[int, Any]) -> Parts:
        """The same for a deep copy of the model, whose copied modules are in ``memo``."""
        members = [
            _planned_part(memo[id(t.module)], t.runner, like=t.planned)
            for t in self.members.values()
            if id(t.module) in memo
        ]
        late = {name: memo[id(module)] for name, module in self.late.values() if id(module) in memo}
        return Parts(members, late, self.plan_late)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In here, and in this thread, parts that are called run planned."""
        _running.stack.append((self, saved_tensors_hooks_in_use()))
        try:
            yield
        finally:
            _running.stack.pop()

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a part."""
        member = self.members.get(id(module))
        if member is not None:
            return (self.run_part or PlannedPart.call)(member, args, kwargs)
        if not self._is_late(module):
            return own_call(module)(*args, **kwargs)

        def forward(*given: Any, **named: Any) -> Any:
            member = self._planned_late(module, given, named)
            return (original_class(module).forward.__get__(module) if member is None else member.planned.forward)(
                *given, **named
            )

        return behind_hooks(module, forward, args, kwargs)

    def has(self, module: torch.nn.Module) -> bool:
        """Whether a module is one of the parts."""
        return id(module) in self.members or id(module) in self.late

    def _is_late(self, module: torch.nn.Module) -> bool:
        """Whether a part is to be planned with this call."""
        is_trained = torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and module.training
        return is_trained and id(module) in self.late and "forward" not in vars(module)

    def _planned_late(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PlannedPart | None:
        """The copy of a part that is called for the first time, if it can be planned."""
        with self.lock:
            if id(module) not in self.late:
                return self.members.get(id(module))
            name, _ = self.late[id(module)]
            del self.late[id(module)]
            try:
                with plainly():
                    graph, plan, planner = self.plan_late(module, name, Call(args, kwargs))
                member = planned_part_of(module, [(graph, plan)], planner)
            except Exception as error:  # if the call is broken, it raises the same from the plain module
                log.warning("ogc runs %s as it is: %s", name, str(error).partition("\n")[0])
                return None
            member.runner.told = self.told
            self.members[id(module)] = member
            return member


class _Running(threading.local):
    """The optimized models that run in this thread, innermost last, each with the hooks that it was called under."""

    def __init__(self) -> None:
        self.stack: list[tuple[Parts, Any]] = []


_running = _Running()


class CallsBeside(Protocol):
    """Takes calls of submodules that no run of an optimized model makes."""

    def has(self, module: torch.nn.Module) -> bool:
        """Whether a module is one of these, not the plain model."""

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module."""


class PartCall:
    """Stands in a part's module for its own call.

    Attributes:
        module: the part.
        part_of: the optimized models that have planned it.
        called_by: the optimized models that it is called for beside their forward.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        self.part_of: weakref.WeakSet[Parts] = weakref.WeakSet()
        self.called_by: list[weakref.ref[CallsBeside]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        if torch.compiler.is_dynamo_compiling():
            return own_call(module)(*args, **kwargs)
        caller = sys._getframe(1).f_locals.get("self")  # another one where the part's attributes were copied or shared
        if isinstance(caller, torch.nn.Module) and caller is not module and vars(caller).get(CALL) is self:
            return own_call(caller)(*args, **kwargs)
        if torch.compiler.is_compiling():
            return own_call(module)(*args, **kwargs)
        for parts, hooks in _running.stack:  # the outermost has planned for all of it
            if parts.has(module) and not is_plain():
                # A call under hooks of others may be repeated in the backward, where no model runs.
                if hooks == saved_tensors_hooks_in_use():
                    return parts.call(module, args, kwargs)
                if id(module) in parts.members:
                    parts.members[id(module)].runner.ran_plain(UNDER_HOOKS, is_told=True)
                break
        else:
            if beside.value and torch.is_grad_enabled() and not is_plain():
                owners = [owner for reference in self.called_by if (owner := reference()) is not None]
                if owners:  # the last one that may plan it; for the others it is the plain model
                    return max(owners, key=lambda owner: owner.has(module)).call(module, args, kwargs)
        return own_call(module)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module is no part of anything."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def install(owner: Parts | CallsBeside, modules: Sequence[torch.nn.Module]) -> weakref.finalize[Any, Any]:
    """Have the calls of modules look at ``owner``, until what is returned is called or as long as that lives."""
    if CALL not in ignored_by_scripts:
        ignored_by_scripts.append(CALL)
    for module in modules:
        found = vars(module).get(CALL)
        if not isinstance(found, PartCall):
            found = vars(module)[CALL] = PartCall(module)
        if isinstance(owner, Parts):
            found.part_of.add(owner)
        else:
            found.called_by.insert(0, weakref.ref(owner))
    return weakref.finalize(owner, _uninstall, list(map(weakref.ref, modules)), weakref.ref(owner))


def _uninstall(modules: list[weakref.ref[torch.nn.Module]], owner: weakref.ref[Any]) -> None:
    gone = owner()
    for reference in modules:
        module = reference()
        call = None if module is None else vars(module).get(CALL)
        if isinstance(call, PartCall):
            if gone is not None:
                call.part_of.discard(gone)
            call.called_by = [one for one in call.called_by if one() not in (None, gone)]
            if not list(call.part_of) and not call.called_by:  # those that are gone may still be counted
                vars(module).pop(CALL)


def module_in_parts(model: torch.nn.Module, parts: Parts, shown: dict[str, Any]) -> torch.nn.Module:
    """A module that shares everything with ``model``, runs its forward, and in training its parts by their plans.

    Args:
        model: the plain model.
        parts: what is planned of it.
        shown: attributes of the result, unless the model has some of these names.

    Raises:
        InputError: the model's forward is not that of its class.
    """
    original, modes = original_class(model), Modes(model)
    of: weakref.WeakKeyDictionary[torch.nn.Module, Parts] = weakref.WeakKeyDictionary()

    plain: Counter[str] = Counter()

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = of.get(self)
        if found is None or is_plain():
            return original.forward(self, *args, **kwargs)
        if why := plain_because(self, modes.in_training_alone):
            plain[why] += 1
            if why in COSTS_THE_SAVING:
                tell_plain(why, found.told)
            return modes.looked_at(self, original.forward(self, *args, **kwargs))
        with found.running():
            return original.forward(self, *args, **kwargs)

    def deep_copy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        member = copied(self, memo)
        of[member] = of[self].copy(memo)
        of[member].install()
        return member

    def report(self: torch.nn.Module) -> Report:
        names = {id(module): name for name, module in self.named_modules()}
        of_parts = [member.runner.report().of(names.get(id(member.module), "")) for member in of[self].members.values()]
        whole = (Calls("", f"plain: {why}", count) for why, count in plain.items())
        return Report((*chain.from_iterable(found.calls for found in of_parts), *whole))

    def refuse_replicas(self: torch.nn.Module) -> Any:
        raise InputError("a model that is planned in parts cannot run in a DataParallel; use DistributedDataParallel")

    members = {"forward": kept_from_compiling(forward), "__deepcopy__": deep_copy, REPLICATE: refuse_replicas}
    result = instance_around(model, original.__name__, members, {**shown, "report": report})
    of[result] = parts
    for member in parts.members.values():
        member.runner.calls.clear()  # those that were measured
    parts.install()
    return result

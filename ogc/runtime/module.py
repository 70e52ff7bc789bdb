"""The module that users get: the original's parameters and submodules, a planned forward."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ..errors import InputError
from ..graph import Graph
from ..plan.plan import Plan
from ..torch_state.forwards import (
    COMPILED_CALL,
    ORIGINAL,
    OWN,
    REPLACED,
    OwnCall,
    OwnForward,
    original_class,
    plain_forward,
)
from ..torch_state.private import CALL, WRAPPED_CALL, is_exporting, share_shards
from ..torch_state.ranks import is_unit
from .calls import REACH, Reach, Report, beside, followed_methods, note_reached
from .runner import LIKE_SAMPLE, Planner, Runner, log

MADE_AGAIN = "_ogc_made_again"
"""The attribute of a module's class that says how it is unpickled: a function of the plain model, further arguments."""

OWN_PLAN = "_ogc_plan"
"""The attribute of a module's class that has its plan, where the model has an attribute ``plan`` of its own too."""

OWN_REPORT = "_ogc_report"
"""Likewise of its report."""


def optimized_module(
    model: torch.nn.Module, graph: Graph, plan: Plan, planner: Planner | None = None
) -> torch.nn.Module:
    """A module that shares everything with ``model`` and runs ``plan`` in training.

    It is an instance of a subclass of the model's class and shares its attributes: parameters, buffers, flags and
    methods are the same for both. Calls that ``plan`` was not made for run what ``planner`` finds for them.
    """
    runner = Runner(model, graph, plan, planner)
    original = original_class(model)

    def deep_copy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        made = copied(self, memo)
        runner.watch(made, like=self)
        return made

    def shallow_copy(self: torch.nn.Module) -> torch.nn.Module:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        runner.watch(made, like=self)
        return made

    def now(name: str, own: Any) -> property:
        """What runs a module by itself has, where it was sharded since."""
        return property(lambda self: getattr(runner.apart[self], name, None) if self in runner.apart else own)

    def report(self: torch.nn.Module) -> Report:
        if (apart := runner.apart.get(self)) is None:
            return runner.report()
        found = getattr(type(apart), OWN_REPORT)(apart).calls
        like_first = (replace(c, kind=runner.apart_kind) if c.kind == LIKE_SAMPLE else c for c in found)
        return Report((*runner.report().calls, *like_first))

    members = {"forward": planned_forward(runner), "__deepcopy__": deep_copy, "__copy__": shallow_copy, OWN_PLAN: plan}
    held = {"plan": plan, "graph": graph, "code": runner.generated.source}
    shown = {**{name: now(name, own) for name, own in held.items()}, "report": report}
    result = instance_around(model, original.__name__, members, shown)
    runner.watch(result, like=model)
    return result


def refuse_replaced_forward(model: torch.nn.Module) -> None:
    """Raise InputError if the model's forward is not that of its class: only one plan for it as it is goes then."""
    if "forward" in vars(model):
        raise InputError(
            "the model's forward was replaced on the instance, which goes with one plan for the forward as it is, not "
            "with parts or a loss behind it; optimize the model before its forward is replaced, or put the replacement "
            "into a subclass"
        )


def planned_forward(runner: Runner) -> Callable[..., Any]:
    """The forward that runs what ``runner`` has for a call, or else the original one."""

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        entry = runner.select(self, args, kwargs)
        if entry is None:
            apart = runner.apart.get(self)
            if apart is not None:
                return apart.forward(*args, **kwargs)
            return runner.modes.looked_at(self, plain_forward(self)(*args, **kwargs))
        return runner.run(entry, self, args, kwargs)

    return kept_from_compiling(forward)


def instance_around(
    model: torch.nn.Module, name: str, members: dict[str, Any], shown: dict[str, Any]
) -> torch.nn.Module:
    """An instance of a subclass, with this name and these members, that shares the model's attributes.

    What is ``shown`` becomes a member too, unless the model has an attribute of that name.
    """
    original, reach = original_class(model), Reach()
    slots = {"__slots__": (REPLACED, COMPILED_CALL), CALL: OwnCall(reach.followed_call)}
    members = {ORIGINAL: original, **slots, "__reduce_ex__": _reduced, **members}
    members = {OWN_PLAN: shown.get("plan"), **members}
    members |= {"__prepare_scriptable__": plain_instance, OWN: members["forward"]}
    if isinstance(model, torch.fx.GraphModule):  # whose forward is a member of its class, which changes with its graph
        members["recompile"] = _recompile
    members["forward"] = OwnForward(members["forward"], model)
    members |= {"__module__": original.__module__, "__doc__": original.__doc__}
    if "report" in shown:
        shown = {**shown, "report": reach.reported(shown["report"])}
        members = {REACH: reach, OWN_REPORT: shown["report"], **followed_methods(original, reach), **members}
    for key, value in shown.items():
        if hasattr(original, key) or key in vars(model):
            log.warning("the model has an attribute %r of its own; the optimized module's %r is not set", key, key)
        else:
            members[key] = value
    result: torch.nn.Module = object.__new__(type(name, (original,), members))
    object.__setattr__(result, "__dict__", vars(model))
    if is_unit(model):
        share_shards(result, model)
    return result


def plain_instance(self: torch.nn.Module) -> torch.nn.Module:
    """An instance of the plain class that shares the attributes: what is scripted."""
    plain: torch.nn.Module = object.__new__(original_class(self))
    object.__setattr__(plain, "__dict__", vars(self))
    if is_unit(plain):
        share_shards(plain, self)
    return plain


def _recompile(self: torch.nn.Module) -> Any:
    plain: Any = plain_instance(self)
    return plain.recompile()


def copied(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """A deep copy of a module that :func:`instance_around` made, without what else its kind may need."""
    kind = _with_own_code(type(module)) if isinstance(module, torch.fx.GraphModule) else type(module)
    made: torch.nn.Module = object.__new__(kind)
    memo[id(module)] = made
    object.__setattr__(made, "__dict__", copy.deepcopy(vars(module), memo))  # one for all that share that of the module
    return made


def _with_own_code(kind: type) -> type:
    """Such a class of an optimized ``GraphModule`` on top of a plain one that is no other module's."""
    original, slots = getattr(kind, ORIGINAL), (REPLACED, COMPILED_CALL)
    own = {name: getattr(original, name) for name in ("forward", WRAPPED_CALL, "__module__")}
    plain = type(original.__name__, (original,), own)
    members = {key: value for key, value in vars(kind).items() if key not in slots}
    return type(kind.__name__, (plain,), {**members, ORIGINAL: plain})


def _reduced(self: torch.nn.Module, protocol: Any) -> Any:
    made_again = getattr(type(self), MADE_AGAIN, None)
    if made_again is None:
        raise InputError(
            "a module with a plan made by hand cannot be pickled, its code is generated; save state_dict() (the keys "
            "are the original model's) or the original model"
        )
    function, *arguments = made_again
    return function, (plain_instance(self), *arguments)


TARGETS = "targets"
"""The name of the argument that a model with a loss takes besides its own."""


def with_loss(model: torch.nn.Module, loss: Callable[..., torch.Tensor], has_targets: bool) -> torch.nn.Module:
    """An instance of a subclass of the model's that shares its attributes and returns ``loss(output, targets)``.

    Without ``has_targets``, ``loss(output)``. Called without targets that it has, it returns what the model returns.

    Raises:
        InputError: the model has an argument ``targets`` of its own, or its forward is not that of its class.
    """
    refuse_replaced_forward(model)
    original = original_class(model)
    signature = inspect.signature(original.forward)
    if TARGETS in signature.parameters:
        raise InputError("the model takes targets of its own; let its forward return the loss, and leave out loss=")

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(TARGETS)] if has_targets and TARGETS in kwargs else []
        output = original.forward(self, *args, **kwargs)
        return loss(output, *given) if given or not has_targets else output

    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    named = [inspect.Parameter(TARGETS, inspect.Parameter.KEYWORD_ONLY, default=None)] if has_targets else []
    forward.__signature__ = signature.replace(parameters=[*own, *named, *rest])  # type: ignore[attr-defined]
    result = instance_around(model, original.__name__, {"forward": forward}, {})
    setattr(type(result), ORIGINAL, type(result))
    return result


ADVICE = (
    "a module that ogc optimized runs by its plan, as it is, and cannot be part of a compiled graph: leave out "
    "fullgraph=True, or compile submodules before ogc.optimize, which calls them as they are"
)


def kept_from_compiling(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, which compiled code calls as it is, with one message.

    What torch.export sees, and torch.compile where no gradients are on, is the plain forward.
    """

    def reached(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        note_reached(self)
        before, beside.value = beside.value, False
        try:
            return forward(self, *args, **kwargs)
        finally:
            beside.value = before

    as_it_is = torch.compiler.disable(reached, reason=ADVICE)

    def forward_or_plain(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_exporting() or (torch.compiler.is_compiling() and not torch.is_grad_enabled()):
            return plain_forward(self)(*args, **kwargs)
        if torch.compiler.is_compiling():
            _tell(original_class(self).__name__)
        return as_it_is(self, *args, **kwargs)

    # Recompilations are counted, and limited, by code object: each optimized module has its own.
    forward_or_plain.__code__ = forward_or_plain.__code__.replace()
    return forward_or_plain


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tell(name: str) -> None:
    """Called while something is compiled, not when it runs."""
    _tell_once(name)


@cache
def _tell_once(name: str) -> None:
    log.warning("torch.compile leaves %s as it is, which ogc optimized: it runs by its plan, and is not compiled", name)

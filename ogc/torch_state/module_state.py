"""Tells, cheaply and before every call, whether a module is still the one that a plan was made for.

A program holds for submodules, hooks, parameters and buffers, training flags, and each parameter's ``requires_grad``,
type, device and shape. They live in dictionaries that PyTorch changes in place: found once, they are compared with what
was seen last, without Python code for each module. Only where something differs is the module described anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch

from .private import CODE, HOOKS, MEMBERS, parameters_of, submodules_of
from .ranks import is_flat, is_spread

T = TypeVar("T")

_training = itemgetter("training")
_requires_grad = attrgetter("requires_grad")
_LOOK = ("requires_grad", "dtype", "device", "shape")
_look = attrgetter(*_LOOK)


class State(NamedTuple):
    """Describes a module; equal where the same program holds."""

    structure: int  # a number for the arrangement of its submodules
    training: tuple[bool, ...]  # the flag of each module
    looks: tuple[Any, ...]  # of each parameter, ``requires_grad``, type, device and shape
    shared: tuple[int | None, ...]  # of each parameter and buffer, the first that it is the same tensor as
    keys: tuple[str, ...]  # the names of parameters and buffers in their modules
    hooks: tuple[int, ...]  # how many each table of hooks has
    forwards: tuple[bool, ...]  # of each module, whether its forward was replaced on the instance
    is_spread: bool  # whether parameters are spread over ranks
    scripts: tuple[Any, ...]  # what scripted modules tell of themselves, and the code of those that torch.fx made


def changed_state(model: torch.nn.Module, then: State, now: State) -> Iterator[str]:
    """In words, in what a module differs from what it was. Without the places of submodules, no names are known."""
    if then.structure != now.structure:
        yield "the submodules are others"
    if len(then.training) != len(now.training) or then.structure != now.structure:
        return
    modules = [("", model), *_named_children(model)]
    plain = [(name or type(model).__name__, module) for name, module in modules if not _is_wrapper(module)]
    names = [name for name, _ in plain]
    for name, was, training in zip(names, then.training, now.training, strict=True):
        if was != training:
            yield f"{name} is in {'training' if training else 'eval'} mode"
    parameters = [f"{n}.{key}" for n, module in plain for key, p in parameters_of(module).items() if p is not None]
    if len(then.looks) == len(now.looks):
        for name, was, look in zip(parameters, then.looks, now.looks, strict=True):
            yield from (
                f"{name} has {_LOOK[n]} {look[n]}, not {was[n]}" for n in range(len(_LOOK)) if was[n] != look[n]
            )
    yield from (f"{key} is a parameter or buffer of its own" for key in sorted({*then.keys} ^ {*now.keys}))
    if then.shared != now.shared:
        yield "other parameters or buffers are one and the same"
    tables = [name for name, module in modules[1:] for table in HOOKS if table in vars(module)]
    for name, before, count in zip(tables, then.hooks, now.hooks, strict=False):
        if before != count:
            yield f"the hooks of {name} are others ({count}, not {before})"
    for name, was, is_replaced in zip(names, then.forwards, now.forwards, strict=True):
        if was != is_replaced:
            yield f"the forward of {name} was {'replaced' if is_replaced else 'put back'} on the instance"
    if then.is_spread != now.is_spread:
        yield f"parameters are {'' if now.is_spread else 'no longer '}spread over ranks"
    if then.scripts != now.scripts:
        yield "a scripted or compiled module is another"


class WatchedModule:
    """One module, whose state is asked for again and again.

    ``structures`` numbers arrangements of submodules that were not seen before; ``structure`` is the one it has now.
    """

    def __init__(self, model: torch.nn.Module, structures: Iterator[int], structure: int = 0) -> None:
        self.structures = structures
        self.structure = structure
        self.children = _children(model)
        self.bound_to: State | None = None
        self._bound: dict[Any, Any] = {}
        self._remember(model)

    def state(self, model: torch.nn.Module) -> State:
        """What the module is now; the same object as long as nothing changes."""
        if not self._is_as_remembered():
            children = _children(model)
            if len(children) != len(self.children) or not all(map(is_, children, self.children)):
                self.structure, self.children = next(self.structures), children
            self._remember(model)
        return self.description

    def trains_as_before(self) -> bool:
        """Whether modes and ``requires_grad`` are as last described; quicker than :meth:`state`."""
        return (
            list(map(_training, self.attributes)) == self.training
            and list(map(_requires_grad, self.parameters)) == self.required
        )

    def bound(self, key: Any, bind: Callable[[], T]) -> T:
        """What ``bind`` returned for a key since something changed last, be it by :meth:`state` or now."""
        if self.bound_to is not self.description or self.is_flat:
            self.bound_to, self._bound = self.description, {}
        if key not in self._bound:
            self._bound[key] = bind()
        found: T = self._bound[key]
        return found

    def _is_as_remembered(self) -> bool:
        return (
            not any(self.empty)
            and sum(map(len, self.full)) == len(self.members)
            and all(map(is_, chain.from_iterable(map(dict.values, self.full)), self.members))
            and list(map(len, self.attributes)) == self.sizes
            and list(map(_training, self.attributes)) == self.training
            and list(map(_look, self.parameters)) == self.looks
            and (not (self.scripted or self.coded) or _describe_scripted(self.scripted, self.coded) == self.scripts)
        )

    def _remember(self, model: torch.nn.Module) -> None:
        # No reference to the module itself: it is the key of the weak dictionary that holds this.
        self.scripted = [child for child in self.children if _is_wrapper(child)]
        plain = [child for child in self.children if not _is_wrapper(child)]
        self.attributes = [vars(module) for module in chain([model], plain)]
        self.coded = [found for found in self.attributes if CODE in found]
        hooks = [found[name] for found in map(vars, self.children) for name in HOOKS if name in found]
        members = [found[name] for found in self.attributes for name in MEMBERS]
        self.empty = [found for found in chain(members, hooks) if not found]
        self.full = [found for found in chain(members, hooks) if found]
        self.members = list(chain.from_iterable(map(dict.values, self.full)))
        self.parameters = [p for found in self.attributes for p in found[MEMBERS[0]].values() if p is not None]
        self.sizes = list(map(len, self.attributes))
        self.training = list(map(_training, self.attributes))
        self.looks = list(map(_look, self.parameters))
        self.required = list(map(_requires_grad, self.parameters))
        self.scripts = _describe_scripted(self.scripted, self.coded)
        self.is_flat = any(map(is_flat, self.parameters))
        self.description = self._describe(hooks)

    def _describe(self, hooks: list[Any]) -> State:
        tensors = [t for name in MEMBERS[:2] for found in self.attributes for t in found[name].values()]
        first: dict[int, int] = {}
        return State(
            self.structure,
            tuple(self.training),
            tuple(self.looks),
            tuple(None if t is None else first.setdefault(id(t), n) for n, t in enumerate(tensors)),  # which are shared
            tuple(key for name in MEMBERS[:2] for found in self.attributes for key in found[name]),
            tuple(map(len, hooks)),
            tuple("forward" in found for found in self.attributes),
            any(map(is_spread, self.parameters)),
            tuple(self.scripts),
        )


def _is_wrapper(module: torch.nn.Module) -> bool:
    """Whether the module's flag is not its own: scripted modules, and those around compiled ones."""
    return isinstance(module, torch.jit.ScriptModule) or "training" not in vars(module)


def _describe_scripted(modules: Sequence[torch.nn.Module], coded: Sequence[dict[str, Any]]) -> list[Any]:
    described = [(module.training, *map(_look, parameters_of(module).values())) for module in modules]
    return [*described, *map(itemgetter(CODE), coded)]


def _children(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Everything below ``model``, with the places where it stands: a module may have several."""
    return [child for _, child in _named_children(model)]


def _named_children(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        for key, child in submodules_of(module).items():
            if child is not None:
                yield f"{name}.{key}" if name else key, child

"""Runs what may change a model, its gradients or the state that PyTorch is in, and leaves no trace of it.

Tells, too, which plain attributes a forward changed: a replayed program does not, so what depends on them would be
wrong.
"""

from __future__ import annotations

import operator
import random
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy
import torch

from .compare import identical
from .private import MEMBERS, buffers_of, pytree
from .random_state import cuda_devices, random_states, set_random_states

LARGE, DEEP = 1000, 4
"""Containers with more items, and those that are nested deeper, are not looked into."""

TABLES = tuple(key for key, value in vars(torch.nn.Module()).items() if isinstance(value, dict))
"""What torch.nn.Module keeps parameters, buffers, submodules and hooks in."""

writing: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models whose forward was seen to write their own parameters: copies are made of these, too."""


_thread = threading.local()


@contextmanager
def plainly() -> Iterator[None]:
    """Optimized modules that are called inside, on this thread, run the plain model: a model is looked at."""
    before, _thread.is_plain = is_plain(), True
    try:
        yield
    finally:
        _thread.is_plain = before


def is_plain() -> bool:
    """Whether optimized modules are to run the plain model."""
    return bool(getattr(_thread, "is_plain", False))


@contextmanager
def untouched(*models: torch.nn.Module, given: Any = (), attributes_stay: bool = False) -> Iterator[None]:
    """Whatever runs inside, and however it ends, all this is afterwards as before:

    * which parameters, buffers, submodules and hooks the modules have, and their plain attributes: flags, values, and
      what lists, dicts and sets among these hold; with ``attributes_stay`` only which buffers they have;
    * what buffers hold, bit by bit, unseen by version counters;
    * which tensors are the gradients of the parameters;
    * the random states of Python, of numpy, of torch on the CPU and all GPUs in use, and of each ``torch.Generator``
      that is an attribute of a module or among ``given``, the arguments of a forward;
    * autocast: for which devices it is on, its types, whether it caches; cached casts are let go of first and last;
    * whether gradients are computed.

    Not put back are what other objects hold, and what parameters and their gradients hold, but for parameters of models
    in ``writing``: that would take a copy, as buffers do. Inference mode is left alone.
    """
    modules = list({id(module): module for model in models for module in model.modules()}.values())
    plain = [] if attributes_stay else [(module, attributes(module)) for module in modules]
    held = [(value, value.copy()) for _, found in plain for value in containers(tuple(found.values()))]
    tables = [(buffers_of(module), dict(buffers_of(module).items())) for module in modules]
    buffers = {id(b): b for _, content in tables for b in content.values() if b is not None}
    copies = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    tables += [(table, dict(table)) for module, _ in plain for table in _tables(module)]
    written = [(p, p.data, p.detach().clone()) for m in models if m in writing for p in m.parameters()]
    gradients = [(p, p.grad) for model in models for p in model.parameters() if p.is_leaf]
    generators = [(generator, generator.get_state()) for generator in generators_of(models, given)]
    devices, settings = cuda_devices(), _settings()
    states, python_state, numpy_state = random_states(devices), random.getstate(), numpy.random.get_state()
    torch.clear_autocast_cache()  # or weights that were cast before are constants of a program
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for setting, values in settings:
            setting(*values)
        set_random_states(states, devices)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        for generator, state in generators:
            generator.set_state(state)
        for module, found in plain:
            for key in attributes(module).keys() - found.keys():
                del vars(module)[key]
            vars(module).update(found)
        for value, content in held + tables:
            _put_back(value, content)
        for parameter, data, copy in written:
            data.copy_(copy)
            parameter.data = data
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for buffer, copy in copies:
            if buffer.layout is not torch.strided or not (torch.equal(buffer, copy) and identical(buffer, copy)):
                buffer.data.copy_(copy)  # unseen by version counters: an earlier forward may wait for its backward


def _settings() -> list[tuple[Any, tuple[Any, ...]]]:
    """What PyTorch is set to on this thread: how each setting is made, with its values."""
    kinds = ("cpu", "cuda")
    return [
        (torch.set_grad_enabled, (torch.is_grad_enabled(),)),
        (torch.set_autocast_cache_enabled, (torch.is_autocast_cache_enabled(),)),
        *((torch.set_autocast_enabled, (kind, torch.is_autocast_enabled(kind))) for kind in kinds),
        *((torch.set_autocast_dtype, (kind, torch.get_autocast_dtype(kind))) for kind in kinds),
    ]


def _put_back(held: Any, content: Any) -> None:
    """Let a list, dict or set hold what it held before."""
    if isinstance(held, list):
        same = len(held) == len(content) and all(map(operator.is_, held, content))
    elif isinstance(held, set):
        same = held == content
    else:
        same = list(held.keys()) == list(content) and all(held[key] is item for key, item in content.items())
    if same:
        return
    if isinstance(held, (list, dict, set)):
        held.clear()
        (held.extend if isinstance(held, list) else held.update)(content)
    else:  # the buffers of a scripted module, whose names are fixed
        for key, item in content.items():
            held[key] = item


def _tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Those of parameters, submodules and hooks; scripted modules have fewer."""
    found = vars(module)
    return [table for name in TABLES if name != MEMBERS[1] and isinstance(table := found.get(name), dict)]


def generators_of(models: Iterable[torch.nn.Module], given: Any = ()) -> list[torch.Generator]:
    """Random generators that modules have as attributes, or that are given."""
    held = chain.from_iterable(vars(module).values() for model in models for module in model.modules())
    found = (thing for thing in chain(held, pytree.tree_leaves(given)) if isinstance(thing, torch.Generator))
    return list({id(generator): generator for generator in found}.values())


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Plain attributes and flags, not what torch.nn.Module keeps in tables of its own."""
    return {key: value for key, value in vars(module).items() if key not in TABLES}


def containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """The lists, dicts and sets that a value is or holds."""
    if not isinstance(value, (list, tuple, dict, set)) or depth == DEEP:
        return
    if type(value) in (list, dict, set):
        yield value
    if length(value) <= LARGE:
        for item in items(value):
            yield from containers(item, depth + 1)


def length(value: Any) -> int:
    """How many items a container has, whatever its class makes of ``len``."""
    return next(kind.__len__(value) for kind in _KINDS if isinstance(value, kind))


def items(value: Any) -> Iterator[Any]:
    """What a container holds, whatever its class makes of it."""
    if isinstance(value, dict):
        return iter(dict.values(value))
    return next(kind.__iter__(value) for kind in _KINDS if isinstance(value, kind))


_KINDS: tuple[Any, ...] = (list, tuple, dict, set)


def attributes_of(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of each module, by its name; what they hold, not what it is held in."""
    return {
        name: {key: _content(value) for key, value in attributes(module).items()}
        for name, module in model.named_modules()
    }


def changes(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], leaves: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The modules that are not inside leaves, with the first attribute of each that differs; see attributes_of."""
    covered = tuple(f"{leaf}." for leaf in leaves)
    for name, found in after.items():
        known = before.get(name, {})
        keys = dict.fromkeys((*found, *known))
        first = next((key for key in keys if known.get(key, _ABSENT) != found.get(key, _ABSENT)), None)
        if first is not None and not f"{name}.".startswith(covered):
            yield name, first


_ABSENT = object()


class _Itself:
    """Equal to what wraps the same object."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.wrapped is other.wrapped

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any, depth: int = 0) -> Any:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return type(value), repr(value)  # a NaN is the same as before
    if not isinstance(value, (list, tuple, dict, set)) or depth == DEEP:
        return _Itself(value)
    if length(value) > LARGE:
        return type(value), length(value)
    if isinstance(value, set):
        return type(value), frozenset(value)
    pairs = dict.items(value) if isinstance(value, dict) else enumerate(items(value))
    return type(value), [(key, _content(item, depth + 1)) for key, item in pairs]

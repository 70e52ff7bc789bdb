"""Runs what may change a model, its gradients or the state that PyTorch is in, and leaves no trace of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..process import OnThread
from .compare import identical, same_bits
from .private import buffers_of, leave_saved_tensors_hooks, pytree, saved_tensors_hooks_in_use
from .reads.objects import TABLES, Before, Held, held_by
from .settings import modes_put_back, random_put_back

unwatched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules that fail where their operators are seen: opaque, they are called without anybody looking."""

writing: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models whose forward was seen to write their own parameters: copies are made of these, too."""

shares_casts = OnThread(False)
"""Whether the caller's autocast has a cache, which is not used while nothing may leave a trace."""

_plain = OnThread(False)
_met: OnThread[dict[int, tuple[Any, Before]] | None] = OnThread(None)
"""What forwards were seen to read and write outside of their modules, since a model is looked at; None if none is."""


@contextmanager
def plainly() -> Iterator[None]:
    """Optimized modules that are called inside, on this thread, run the plain model: a model is looked at.

    Operators are weighed on tensors that nobody has filled, where NaN means nothing: anomalies are not detected.
    """
    with _plain.set_to(True), remembering(), torch.autograd.set_detect_anomaly(False):
        yield


@contextmanager
def remembering() -> Iterator[None]:
    """Inside, on this thread, what is put back as well is put back each time."""
    with _met.set_to({} if _met.value is None else _met.value):
        yield


def put_back_as_well(things: Iterable[tuple[Any, Before]]) -> None:
    """In :func:`remembering`, :func:`untouched` lets these hold what they held, too."""
    if _met.value is not None:
        _met.value.update({id(thing): (thing, before) for thing, before in things})


def is_plain() -> bool:
    """Whether optimized modules are to run the plain model."""
    return _plain.value


@contextmanager
def untouched(*models: torch.nn.Module, given: Any = (), attributes_stay: bool = False) -> Iterator[None]:
    """Whatever runs inside, and however it ends, all this is afterwards as before:

    * which parameters, buffers, submodules and hooks the modules have, and their plain attributes: flags, values, and
      what lists, dicts and sets among these hold; with ``attributes_stay`` only which buffers they have;
    * what buffers hold, bit by bit, unseen by version counters;
    * which tensors are the gradients of the parameters;
    * the random states of Python, of numpy, of torch on the CPU and all GPUs in use, and of each ``torch.Generator``
      that is an attribute of a module or among ``given``, the arguments of a forward;
    * autocast and its cache, which is not used inside of a region of the caller's;
    * whether gradients are computed, and that no hooks for saved tensors are on that were put on inside;
    * what other objects hold that a forward was seen to read from, such as globals, since the model is looked at.

    What parameters and their gradients hold is not put back, but for parameters of models in ``writing``: it would take
    a copy. Inference mode is left alone.
    """
    known = {} if attributes_stay or _met.value is None else _met.value
    modules = list({id(module): module for model in models for module in model.modules()}.values())
    modes = modes_put_back()  # before casts are let go, which sets one
    put_back: list[Callable[[], object]] = [
        _let_casts_go(),
        _let_hooks_go(),
        modes,
        *(partial(before.renewed(thing).put_back, thing) for thing, before in known.values()),
        random_put_back(generators_of(models, given)),
        members_put_back(modules, attributes_stay),
        _tensors_put_back(models, modules),
    ]
    try:
        yield
    finally:
        for put in put_back:
            put()


def members_put_back(modules: Iterable[torch.nn.Module], attributes_stay: bool = False) -> Callable[[], None]:
    """Gives modules, when called, the attributes and members that they have now; see :func:`untouched`."""
    tables = [buffers_of(module) for module in modules]
    things = [] if attributes_stay else chain.from_iterable(map(held_by, modules))
    held = Held([*things, *(table for table in tables if isinstance(table, dict))])
    scripted = [(table, key, item) for table in tables if not isinstance(table, dict) for key, item in table.items()]

    def put_back() -> None:
        held.put_back()
        for table, key, item in scripted:
            if table[key] is not item:
                table[key] = item

    return put_back


def _tensors_put_back(models: Iterable[torch.nn.Module], modules: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Gives buffers, when called, their memory and content, and parameters their gradients."""
    buffers = {id(b): b for module in modules for b in buffers_of(module).values() if b is not None}
    copies = [(buffer, buffer.data, buffer.detach().clone()) for buffer in buffers.values()]
    written = [(p, p.data, p.detach().clone()) for model in models if model in writing for p in model.parameters()]
    gradients = [(p, p.grad) for model in models for p in model.parameters() if p.is_leaf]

    def put_back() -> None:
        for parameter, data, copy in written:
            data.copy_(copy)
            parameter.data = data
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for buffer, data, copy in copies:
            if not (same_bits(buffer, copy) and identical(buffer, copy)):
                # Unseen by version counters: an earlier forward may wait for its backward. It may have another memory.
                data.copy_(copy)
                buffer.data = data

    return put_back


def cut_history(modules: Iterable[torch.nn.Module]) -> None:
    """Put tensors in the places of attributes and buffers that have a history, until these are put back.

    A backward ends at them, which else would run through earlier forwards and let go of what they saved.
    """
    for module in modules:
        for table in (vars(module), buffers_of(module)):
            for key, value in table.items():
                if key not in TABLES and any(map(_has_past, pytree.tree_leaves(value))):
                    table[key] = pytree.tree_map_only(torch.Tensor, _cut, value)


def _has_past(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad) if _has_past(tensor) else tensor


def _let_hooks_go() -> Callable[[], None]:
    """Takes off hooks for saved tensors that are put on from now on: an interrupt may come before their end is sure."""
    before = saved_tensors_hooks_in_use()

    def let_go() -> None:
        while saved_tensors_hooks_in_use() not in (None, before):
            leave_saved_tensors_hooks()

    return let_go


def _let_casts_go() -> Callable[[], None]:
    """Let go of casts that autocast has, or weights that were cast before would be constants of a program.

    Those of a region that the caller is in stay for the caller, and are not used. What is returned does it again.
    """
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        before, shares_casts.value = shares_casts.value, shares_casts.value or torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        return lambda: setattr(shares_casts, "value", before)
    torch.clear_autocast_cache()
    return torch.clear_autocast_cache


def generators_of(models: Iterable[torch.nn.Module], given: Any = ()) -> list[torch.Generator]:
    """Random generators that modules have as attributes, or that are given."""
    held = chain.from_iterable(vars(module).values() for model in models for module in model.modules())
    things = [*held, *pytree.tree_leaves(given)]
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, torch.Generator)}  # of few, as that takes long
    return list({id(thing): thing for thing in things if type(thing) in kinds}.values()) if kinds else []

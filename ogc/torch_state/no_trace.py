"""Runs what may change a model, its gradients or the state that PyTorch is in, and leaves no trace of it."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy
import torch

from ..on_thread import OnThread
from .compare import identical, same_bits
from .private import buffers_of, leave_saved_tensors_hooks, pytree, saved_tensors_hooks_in_use
from .reads.objects import TABLES, Before, held_by
from .settings import cuda_devices, random_states, set_random_states

unwatched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules that fail where their operators are seen: as leaves they are called without anybody looking."""

writing: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models whose forward was seen to write their own parameters: copies are made of these, too."""


_plain = OnThread(False)
_met: OnThread[dict[int, tuple[Any, Before]] | None] = OnThread(None)
"""What forwards were seen to read and write outside of their modules, since a model is looked at; None if none is."""


@contextmanager
def plainly() -> Iterator[None]:
    """Optimized modules that are called inside, on this thread, run the plain model: a model is looked at."""
    with _plain.set_to(True), remembering():
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
    * autocast: for which devices it is on, its types, its cache, which is not used inside of a region of the caller's;
    * whether gradients are computed, and that no hooks for saved tensors are on that were put on inside;
    * what other objects hold that a forward was seen to read from, such as globals, since the model is looked at.

    Not put back are what all others hold, and what parameters and their gradients hold, but for parameters of models
    in ``writing``: that would take a copy, as buffers do. Inference mode is left alone.
    """
    known = {} if attributes_stay or _met.value is None else _met.value
    met = [(thing, before.renewed(thing)) for thing, before in known.values()]
    modules = list({id(module): module for model in models for module in model.modules()}.values())
    put_back = members_put_back(modules, attributes_stay)
    buffers = {id(b): b for module in modules for b in buffers_of(module).values() if b is not None}
    copies = [(buffer, buffer.data, buffer.detach().clone()) for buffer in buffers.values()]
    written = [(p, p.data, p.detach().clone()) for m in models if m in writing for p in m.parameters()]
    gradients = [(p, p.grad) for model in models for p in model.parameters() if p.is_leaf]
    generators = [(generator, generator.get_state()) for generator in generators_of(models, given)]
    devices = cuda_devices()
    states, python_state, numpy_state = random_states(devices), random.getstate(), numpy.random.get_state()
    settings = [partial(setting, *values) for setting, values in _settings()]
    first: list[Callable[[], object]] = [_let_casts_go(), _let_hooks_go(), *settings]
    try:
        yield
    finally:
        for let_go in first:
            let_go()
        for thing, before in met:
            before.put_back(thing)
        set_random_states(states, devices)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        for generator, state in generators:
            generator.set_state(state)
        put_back()
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


def members_put_back(modules: Iterable[torch.nn.Module], attributes_stay: bool = False) -> Callable[[], None]:
    """Gives modules, when called, the attributes and members that they have now; see :func:`untouched`."""
    buffers = [buffers_of(module) for module in modules]
    held = [] if attributes_stay else [*chain.from_iterable(map(held_by, modules))]
    held += [(table, Before(table)) for table in buffers if isinstance(table, dict)]
    scripted = [(table, dict(table.items())) for table in buffers if not isinstance(table, dict)]  # with fixed names

    def put_back() -> None:
        for thing, before in held:
            before.put_back(thing)
        for table, content in scripted:
            for key, item in content.items():
                if table[key] is not item:
                    table[key] = item

    return put_back


def cut_history(modules: Sequence[torch.nn.Module]) -> None:
    """Put tensors in the places of attributes and buffers that have a history, until these are put back: at these a
    backward ends, which else would run through earlier forwards and let go of what they saved."""
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
        torch.set_autocast_cache_enabled(False)
        return lambda: None
    torch.clear_autocast_cache()
    return torch.clear_autocast_cache


def _settings() -> list[tuple[Any, tuple[Any, ...]]]:
    """What PyTorch is set to on this thread: how each setting is made, with its values."""
    kinds = ("cpu", "cuda")
    return [
        (torch.set_grad_enabled, (torch.is_grad_enabled(),)),
        (torch.set_autocast_cache_enabled, (torch.is_autocast_cache_enabled(),)),
        *((torch.set_autocast_enabled, (kind, torch.is_autocast_enabled(kind))) for kind in kinds),
        *((torch.set_autocast_dtype, (kind, torch.get_autocast_dtype(kind))) for kind in kinds),
    ]


def generators_of(models: Iterable[torch.nn.Module], given: Any = ()) -> list[torch.Generator]:
    """Random generators that modules have as attributes, or that are given."""
    held = chain.from_iterable(vars(module).values() for model in models for module in model.modules())
    found = (thing for thing in chain(held, pytree.tree_leaves(given)) if isinstance(thing, torch.Generator))
    return list({id(generator): generator for generator in found}.values())

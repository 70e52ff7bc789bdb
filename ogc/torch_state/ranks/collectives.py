"""Operators by which ranks talk to one another, and what stands in for them while a model is only looked at.

A rank may plan alone, at any time: it must not wait for others, which do not plan, nor have them wait. So planning runs
no collective. Each gives what it would give if all ranks held what this one holds, up to what is summed: shapes and
types are right, the numbers are of no use, and nothing is made of them.

All collectives of PyTorch, functional ones too, come to the operators of one namespace. PyTorch's dispatcher knows a
key without kernels of its own that goes before all others; these operators get kernels for it, and it is on while a
rank is alone, on all threads that a backward runs on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch

from ...on_thread import OnThread
from ..private import ALONE, OPERATOR_NAMES, alone_on_this_thread, finished_work, pytree, schema_of

OPERATORS = "c10d"
"""The namespace of the operators that all collectives come to."""

_told: OnThread[Callable[[], object] | None] = OnThread(None)


def are_several() -> bool:
    """Whether this process is one of several that talk to one another."""
    return _has_begun() and torch.distributed.get_world_size() > 1


def _has_begun() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def alone() -> Iterator[None]:
    """Inside, no collective is run, forward or backward: what stands in for it is. Other ranks need not be here."""
    if not _has_begun():
        yield
        return
    _install()
    with alone_on_this_thread():
        yield


def arrived(result: Any) -> Any:
    """A result of collectives, with tensors in it that are there: functional ones give some that are on their way."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(module, "AsyncCollectiveTensor", None)
    return result if kind is None else pytree.tree_map_only(kind, _Arrival.apply, result)


class _Arrival(torch.autograd.Function):
    """Waits for a tensor; its gradient goes on as it is."""

    @staticmethod
    def forward(ctx: Any, coming: Any) -> torch.Tensor:
        there: torch.Tensor = coming.trigger_wait()
        return there

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def told_of_collectives(told: Callable[[], object]) -> AbstractContextManager[None]:
    """``told()`` is called for each collective that is not run inside, on this thread."""
    return _told.set_to(told)


@cache
def _install() -> tuple[torch.library.Library, ...]:
    others, library = torch.library.Library("_", "IMPL"), torch.library.Library(OPERATORS, "IMPL")
    others.fallback(torch.library.fallthrough_kernel, ALONE)
    for name in OPERATOR_NAMES():
        if name.startswith(f"{OPERATORS}::"):
            operator = getattr(torch.ops.c10d, name.partition("::")[2]).default
            library.impl(name.partition("::")[2], partial(_stand_in, schema_of(operator)), ALONE)
    return others, library  # which take the kernels back when they are let go


def _stand_in(schema: Any, *args: Any, **kwargs: Any) -> Any:
    """What a collective, which writes into what it is given, leaves and returns."""
    if _told.value is not None:
        _told.value()
    outputs, second = args[0], schema.arguments[1].name if len(schema.arguments) > 1 else ""
    with torch.no_grad():
        if second.startswith("input"):
            _fill(outputs, args[1])
        elif "recv" in schema.name:
            _fill(outputs, ())
    found = tuple(finished_work() if "Work" in str(result.type) else outputs for result in schema.returns)
    return found[0] if len(found) == 1 else found or None


def _fill(made: Any, given: Any) -> None:
    """Write what is given, as often as it takes, into each tensor that is to be made; without any, zeros."""
    sources = [tensor.reshape(-1) for tensor in pytree.tree_leaves(given) if torch.is_tensor(tensor)]
    for target in pytree.tree_leaves(made):
        target.zero_()
        if sources and target.numel():
            source = torch.cat(sources)
            times = -(-target.numel() // max(1, source.numel()))
            target.copy_(source.repeat(times)[: target.numel()].view(target.shape))

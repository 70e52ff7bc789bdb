"""The functions by which PyTorch itself calls its operators from Python: they take a third of the time of torch.ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...program.program import WithoutGrad, tensor_leaves
from ...torch_state.dispatch import Call, complete, dispatched_to
from ...torch_state.private import NN_FUNCTIONS, OpOverload, nn_functions, schema_of
from ..weigh.call import call_key


class Bindings:
    """Finds, for calls of operators, functions that dispatch the same operator with the same arguments."""

    def __init__(self) -> None:
        self.seen: dict[Any, str | None] = {}

    def of(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """The name of a function for a call; None if there is none. The operator does not run."""
        operator = target.operator if isinstance(target, WithoutGrad) else target
        tensors = tensor_leaves(args, kwargs)
        # Tensors of other classes may have something to say about a function, and not about an operator.
        if not isinstance(operator, OpOverload) or not tensors or any(type(t) not in _TYPES for t in tensors):
            return None
        key = call_key(operator, args, kwargs)
        if key not in self.seen:
            fitting = (name for name, function in _functions(operator) if _dispatches(function, operator, args, kwargs))
            self.seen[key] = next(fitting, None)
        return self.seen[key]


_TYPES = (torch.Tensor, torch.nn.Parameter)


def _functions(operator: OpOverload) -> Iterator[tuple[str, Any]]:
    """Functions, in C++ alone, that may call an operator, and their names."""
    if operator.namespace != "aten":
        return
    name = schema_of(operator).name.removeprefix("aten::")
    for prefix, holder in (("torch", torch), (NN_FUNCTIONS, nn_functions), ("torch.Tensor", torch.Tensor)):
        function = getattr(holder, name, None)
        if type(function) in (type(torch.relu), type(torch.Tensor.relu)):
            yield f"{prefix}.{name}", function


class _Seen(Exception):
    """Ends a call before it does anything."""


def _dispatches(function: Any, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the first operator that a function dispatches is this one, with these arguments."""
    found: list[Call] = []

    def stop(call: Call) -> None:
        found.append(call)
        raise _Seen

    try:
        with dispatched_to(stop):
            function(*args, **kwargs)
    except (_Seen, TypeError, RuntimeError, ValueError, IndexError):  # it takes other arguments
        pass
    if len(found) != 1 or found[0].operator is not operator:
        return False
    ours, theirs = complete(operator, found[0].args, found[0].kwargs), complete(operator, args, kwargs)
    return _same(ours[0], theirs[0]) and _same(list(ours[1].values()), list(theirs[1].values()))


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return ours is theirs
    return type(ours) is type(theirs) and bool(ours == theirs)

"""Other forms of single calls.

Bindings are functions by which PyTorch calls its operators from Python: they take a third of the time of torch.ops.
Casts of one parameter that autocast shares become one call. Some calls are unfolded into the operators that PyTorch
makes them of, after a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ...operators.registry import of
from ...program.program import SHARED, WithoutGrad, call_beside, tensor_leaves
from ...torch_state.compare import same_bits
from ...torch_state.dispatch import Call, complete, dispatched_to
from ...torch_state.private import NN_FUNCTIONS, OpOverload, nn_functions, schema_of
from ..weigh.call import call_key, own_argument


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


# -- shared casts ----------------------------------------------------------------------------------------


def share_casts(graph: torch.fx.Graph) -> None:
    """Put the first cast of a parameter in the place of later ones to the same type, which are recorded, too."""
    first: dict[Any, torch.fx.Node] = {}
    for node in [node for node in graph.nodes if node.meta.get(SHARED)]:
        known = first.setdefault(node.args[:2], node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


# -- calls that are unfolded -----------------------------------------------------------------------------


UNFOLDED = "unfolded"
"""In a node's ``meta``: the name of the recorded call that it is a part of, and what that is made of."""

MadeOf = Callable[..., Any]
"""``made_of(call, *args, **kwargs)``: the result, made by ``call(operator, *args, **kwargs)`` for each in turn."""


def unfolds(target: Any, args: Any, kwargs: Any) -> MadeOf | None:
    """What a call is made of, if that gives the bits of the call's results and gradients, which is tried."""
    rule = of(target).unfolded
    made_of = None if rule is None else rule(args, kwargs)
    if made_of is None:
        return None
    with torch.random.fork_rng([]), torch.enable_grad():
        state = torch.get_rng_state()
        made = partial(made_of, lambda operator, *args, **kwargs: operator(*args, **kwargs))
        found = [_tried(state, function, args, kwargs) for function in (target, made)]
    is_same = all(a.stride() == b.stride() and same_bits(a, b) for a, b in zip(*found, strict=True))
    return made_of if is_same else None


def _tried(state: torch.Tensor, function: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The result, the gradients and the random state afterwards."""
    torch.set_rng_state(state)
    own_args, own_kwargs = map_aggregate((args, kwargs), partial(own_argument, copied=False))
    result = function(*own_args, **own_kwargs)
    starts = [t for t in tensor_leaves(own_args, own_kwargs) if t.requires_grad]
    gradients = torch.autograd.grad(result, starts, result.detach().cos()) if starts else ()
    return [result.detach(), *gradients, torch.get_rng_state()]


def _made_beside(node: torch.fx.Node, made_of: MadeOf, operator: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    made = call_beside(node, operator, *args, **kwargs)
    made.meta[UNFOLDED] = node.name, made_of
    return made


class Unfolding:
    """Calls that were met in a program and may be unfolded; of those that are alike, one is tried."""

    def __init__(self) -> None:
        self.tried: dict[Any, MadeOf | None] = {}
        self.found: dict[str, MadeOf] = {}  # by the name of the node

    def meet(self, node: torch.fx.Node, args: Any, kwargs: Any) -> None:
        """Find out whether a call is to be unfolded."""
        if of(node.target).unfolded is None:
            return
        key = call_key(node.target, args, kwargs)
        if key not in self.tried:
            self.tried[key] = unfolds(node.target, args, kwargs)
        if (made_of := self.tried[key]) is not None:
            self.found[node.name] = made_of

    def carry_out(self, graph: torch.fx.Graph) -> bool:
        """Put what they are made of in the place of the calls that were found; whether there were any."""
        calls = [node for node in graph.nodes if node.name in self.found]
        for node in calls:
            made_of = self.found.pop(node.name)
            with graph.inserting_before(node):
                result = made_of(partial(_made_beside, node, made_of), *node.args, **node.kwargs)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return bool(calls)

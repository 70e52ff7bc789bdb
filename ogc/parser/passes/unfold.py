"""Calls that are unfolded into the operators that PyTorch makes them of, so that a plan may choose among these.

Which calls, and into what, says the room of their operator. Every kind of call is tried before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ...operators.registry import of
from ...program.program import call_beside, tensor_leaves
from ...torch_state.compare import same_bits
from ..weigh.call import call_key, own_argument

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
            with graph.inserting_before(node):
                result = self.found.pop(node.name)(partial(call_beside, node), *node.args, **node.kwargs)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return bool(calls)

"""Attention with dropout on a CPU, unfolded into the operators that PyTorch makes it of there.

As one operator it saves nine tensors of its own, which a plan could only keep or remake together, matrix products and
all. Unfolded, the products may be kept and the rest made again. Source of the sequence:
``_scaled_dot_product_attention_math`` in aten/src/ATen/native/transformers/attention.cpp; the same operators in the
same order make the same autograd graph. Every kind of call is tried before it is believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ...program.program import call_beside, tensor_leaves
from ...torch_state.compare import same_bits
from ..weigh.calls import own_argument
from ..weigh.estimate import call_key

aten = torch.ops.aten

ATTENTION = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Attention:
    """What the operators that a call of attention is made of depend on, besides its arguments."""

    heads: int
    width: int
    dtype: torch.dtype
    has_boolean_mask: bool

    def unfolded(
        self,
        call: Callable[..., Any],
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        **_: Any,
    ) -> Any:
        """The result, made by ``call(operator, *args, **kwargs)`` for each operator in turn."""
        root = math.sqrt(1 / math.sqrt(self.width) if scale is None else scale)
        query = call(aten.mul.Scalar, query, root)
        key = call(aten.mul.Scalar, call(aten.transpose.int, key, -2, -1), root)
        scores = self._product(call, query, key)
        if is_causal:
            one = call(aten.select.int, call(aten.select.int, call(aten.detach.default, scores), 0, 0), 0, 0)
            mask = call(aten.tril.default, call(aten.ones_like.default, one, dtype=torch.bool))
        if is_causal or self.has_boolean_mask:
            zeros = call(aten.zeros_like.default, mask, dtype=self.dtype)
            mask = call(aten.masked_fill.Scalar, zeros, call(aten.logical_not.default, mask), -math.inf)
        if mask is not None:
            scores = call(aten.add.Tensor, scores, mask)
        shares = call(aten.dropout.default, call(aten._safe_softmax.default, scores, -1), dropout_p, True)
        return self._product(call, shares, value)

    def _product(self, call: Callable[..., Any], one: Any, other: Any) -> Any:
        factors = [call(aten.flatten.using_ints, factor, 0, 1) for factor in (one, other)]
        return call(aten.unflatten.int, call(aten.bmm.default, *factors), 0, [-1, self.heads])


def unfolds(target: Any, args: Any, kwargs: Any) -> Attention | None:
    """What a call is made of, if that gives the bits of the call's results and gradients, which is tried."""
    if target is not ATTENTION or not kwargs.keys() <= {"scale", "enable_gqa"} or kwargs.get("enable_gqa", False):
        return None
    given: tuple[Any, ...] = (*args, *(None, 0.0, False)[len(args) - 3 :])
    query, key, value, mask, dropout_p, _ = given
    alike = all(t.device.type == "cpu" and t.dim() == 4 and t.dtype in _TYPES for t in (query, key, value))
    if not alike or not dropout_p or not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return None
    has_boolean_mask = mask is not None and mask.dtype == torch.bool
    attention = Attention(query.shape[1], query.shape[-1], query.dtype, has_boolean_mask)
    with torch.random.fork_rng([]), torch.enable_grad():
        state = torch.get_rng_state()
        found = [_tried(state, function, args, kwargs) for function in (target, partial(attention.unfolded, _run))]
    is_same = all(a.stride() == b.stride() and same_bits(a, b) for a, b in zip(*found, strict=True))
    return attention if is_same else None


_TYPES = (torch.float32, torch.float64)
"""Others are computed in float32."""


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def _tried(state: torch.Tensor, function: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The result, the gradients and the random state afterwards."""
    torch.set_rng_state(state)
    own_args, own_kwargs = map_aggregate((args, kwargs), partial(own_argument, copied=False))
    result = function(*own_args, **own_kwargs)
    starts = [t for t in tensor_leaves(own_args, own_kwargs) if t.requires_grad]
    gradients = torch.autograd.grad(result, starts, result.detach().cos()) if starts else ()
    return [result.detach(), *gradients, torch.get_rng_state()]


class Unfolding:
    """Calls of attention that were met in a program; of those that are alike, one is tried."""

    def __init__(self) -> None:
        self.tried: dict[Any, Attention | None] = {}
        self.found: dict[str, Attention] = {}  # by the name of the node

    def meet(self, node: torch.fx.Node, args: Any, kwargs: Any) -> None:
        """Find out whether a call is to be unfolded."""
        if node.target is not ATTENTION:
            return
        key = call_key(node.target, args, kwargs)
        if key not in self.tried:
            self.tried[key] = unfolds(node.target, args, kwargs)
        if (attention := self.tried[key]) is not None:
            self.found[node.name] = attention

    def carry_out(self, graph: torch.fx.Graph) -> bool:
        """Put what they are made of in the place of the calls that were found; whether there were any."""
        calls = [node for node in graph.nodes if node.name in self.found]
        for node in calls:
            with graph.inserting_before(node):
                result = self.found.pop(node.name).unfolded(partial(call_beside, node), *node.args, **node.kwargs)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return bool(calls)

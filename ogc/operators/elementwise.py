"""Operators that work entry by entry, that move entries, and losses.

Low-memory variants of the first write their input's gradient over their result's, where that is whole and not shared.
"""

from __future__ import annotations

from typing import Any

import torch

from ..torch_state.private import OpOverload, is_view, schema_of, untraced
from .low_memory import LowMemory, is_ours
from .registry import Operator, like, register, run_for_bytes
from .weights import Use, Weights

aten = torch.ops.aten


class WrittenOver(LowMemory):
    """An operator whose backward may write over the gradient that it is given."""

    cpu_only = False
    writes_over = True

    def apply(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return self.function.apply(*args, keywords)

    def suits(self, *args: Any) -> bool:
        # Autograd rebases views that are written in place for its own operators only.
        return not (is_view(args[0]) and schema_of(self.operator).is_mutable)

    def weights(self, use: Use, plain: Weights) -> Weights:
        return plain.written_over()


def _low_memory(operator: OpOverload, backward: Any, saves: str, *constants: Any) -> WrittenOver:
    """Of an operator whose backward is ``backward(gradient, saved, *constants)``, element by element."""
    again_differentiable = _silu_backward if backward is aten.silu_backward else backward.default

    class Elementwise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
            result: torch.Tensor = operator(x, **keywords)
            if schema_of(operator).is_mutable:
                ctx.mark_dirty(x)
            ctx.keywords = keywords
            ctx.save_for_backward(result if saves == "result" else x)
            return result

        @staticmethod
        @untraced
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            in_place = is_ours(gradient)
            arguments = (gradient, *ctx.saved_tensors, *constants)
            if torch.is_grad_enabled():
                return again_differentiable(*arguments, **ctx.keywords), None
            if in_place and gradient.stride() == arguments[1].stride():
                return backward.grad_input(*arguments, **ctx.keywords, grad_input=gradient), None
            return backward.default(*arguments, **ctx.keywords), None

    return WrittenOver(operator, Elementwise)


def _silu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What autograd uses where silu's own backward, which has no derivative, would not do."""
    sigmoid = x.sigmoid()
    return gradient * sigmoid * (1 + x * (1 - sigmoid))


def _threshold_backward(gradient: torch.Tensor, result: torch.Tensor, *rest: Any) -> torch.Tensor:
    alike = gradient.is_contiguous() and result.is_contiguous() and gradient.dtype == result.dtype
    return like(gradient) if alike else aten.threshold_backward.default(gradient, result, *rest)


RESHAPING = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
_MOVING = (
    aten.flatten.using_ints,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.narrow.default,
    aten.split.Tensor,
    aten.chunk.default,
    aten.unbind.int,
    aten.alias.default,
    aten.contiguous.default,
)


def _has_mask(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors)


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    first, *others = tensors
    if not all(t.is_contiguous() and t.dtype == first.dtype and t.dim() == first.dim() for t in tensors):
        return aten.cat.default(tensors, dim)
    shape = list(first.shape)
    shape[dim] += sum(t.shape[dim] for t in others)
    return first.new_empty(shape)


def _overloads(*packets: Any) -> list[Any]:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


register(
    Operator(aten.relu.default, _low_memory(aten.relu.default, aten.threshold_backward, "result", 0), on_meta=like),
    Operator(aten.relu_.default, _low_memory(aten.relu_.default, aten.threshold_backward, "result", 0)),
    Operator(aten.sigmoid.default, _low_memory(aten.sigmoid.default, aten.sigmoid_backward, "result")),
    Operator(aten.tanh.default, _low_memory(aten.tanh.default, aten.tanh_backward, "result")),
    Operator(aten.silu.default, _low_memory(aten.silu.default, aten.silu_backward, "input")),
    Operator(aten.gelu.default, _low_memory(aten.gelu.default, aten.gelu_backward, "input")),
    *run_for_bytes(aten.mish.default, aten.maximum.default, aten.minimum.default),
    Operator(aten.threshold_backward.default, on_meta=_threshold_backward),
    *(Operator(one, needs_data=_has_mask) for one in (aten.index_put.default, aten.index_put_.default)),
    *(Operator(one, needs_data=_has_mask) for one in (aten.masked_scatter.default, aten.masked_scatter_.default)),
    *(Operator(one, chooses_by_mask=True) for one in _overloads(aten.where, aten.masked_fill, aten.masked_fill_)),
    Operator(aten.cat.default, on_meta=_cat),
    *(Operator(one, moves=True) for one in (*RESHAPING, *_MOVING)),
    # Under a dispatch mode their backwards add up out of place.
    *run_for_bytes(aten.gather.default, aten.index_select.default),
    Operator(aten.requires_grad_.default, begins_graph=True),
    # A CPU has all distances at once.
    *run_for_bytes(aten.mse_loss.default, aten.smooth_l1_loss.default),
    *run_for_bytes(aten.cosine_embedding_loss.default, aten.triplet_margin_loss.default),
)

"""Operators that pick, place, join and reshape, or change nothing but how a tensor is seen."""

from __future__ import annotations

from typing import Any

import torch

from .cuda.hidden import of_embedding
from .registry import Operator, register, run_for_bytes
from .slices.axes import joined, moved, of_first

aten = torch.ops.aten


_RESHAPING = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default)
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
    *(Operator(one, needs_data=_has_mask) for one in (aten.index_put.default, aten.index_put_.default)),
    *(Operator(one, needs_data=_has_mask) for one in (aten.masked_scatter.default, aten.masked_scatter_.default)),
    *(Operator(one, chooses_by_mask=True) for one in _overloads(aten.where, aten.masked_fill, aten.masked_fill_)),
    Operator(aten.cat.default, along=joined, on_meta=_cat),
    *(Operator(one, along=moved(one), moves=True, sizes=1) for one in _RESHAPING),
    *(Operator(one, along=moved(one), moves=True) for one in _MOVING),
    *(Operator(one, along=of_first(lambda args, axis: axis)) for one in _overloads(aten.to, aten._to_copy)),
    # Under a dispatch mode their backwards add up out of place.
    *run_for_bytes(aten.gather.default, aten.index_select.default),
    Operator(aten.embedding.default, hidden_on_cuda=of_embedding),
    Operator(aten.requires_grad_.default, begins_graph=True),
)

"""Operators that pick, place, join and reshape, or change nothing but how a tensor is seen."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Arguments, Operator, ones_like, register

aten = torch.ops.aten


def _has_mask(tensors: list[torch.Tensor]) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors)


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    first, *others = tensors
    if not all(t.is_contiguous() and t.dtype == first.dtype and t.dim() == first.dim() for t in tensors):
        return aten.cat.default(tensors, dim)
    shape = list(first.shape)
    shape[dim] += sum(t.shape[dim] for t in others)
    return first.new_empty(shape)


def _keeps_first_axis(args: Arguments) -> bool:
    x, *start = args
    return bool(x.dim() > 1 and start and start[0] % x.dim() > 0)


def _overloads(*packets: Any) -> list[Any]:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


register(
    *(Operator(one, needs_data=_has_mask) for one in (aten.index_put.default, aten.index_put_.default)),
    *(Operator(one, needs_data=_has_mask) for one in (aten.masked_scatter.default, aten.masked_scatter_.default)),
    *(Operator(one, chooses_by_mask=True) for one in _overloads(aten.where, aten.masked_fill, aten.masked_fill_)),
    Operator(aten.cat.default, on_meta=_cat),
    # Under a dispatch mode their backwards add up out of place.
    *(Operator(one, to_run_with=ones_like) for one in (aten.gather.default, aten.index_select.default)),
    Operator(aten.flatten.using_ints, by_sample=_keeps_first_axis),
    Operator(aten.requires_grad_.default, begins_graph=True),
)

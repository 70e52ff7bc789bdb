"""Copies of what a model or a leaf is given, for runs on the side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..torch_state.private import storage_id, untraced
from .layouts import Layout, is_dense
from .program import storage_of


class Start(torch.autograd.Function):
    """Makes tensors differentiable, as what operators made is: they may be written, and no graph holds them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        return (None, *(None for _ in gradients))


anchor = torch.empty(0, requires_grad=True)
"""What a ``Start`` takes first."""


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of their own for a run on the side, of the same strides; those that share memory share it again.

    Autograd's graph starts at them. Those that are leaves are leaves again; others are results of a ``Start`` each,
    whose node has the number of the input.
    """
    tensors = list(tensors)
    made = zip(made_copies(tensors), tensors, strict=True)
    return [_copy_like(copy.detach(), tensor, number) for number, (copy, tensor) in enumerate(made)]


def _copy_like(copy: torch.Tensor, tensor: torch.Tensor, number: int) -> torch.Tensor:
    if tensor.is_leaf or not tensor.requires_grad:
        return copy.requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        (started,) = Start.apply(anchor, copy)
    started.grad_fn.number_of_input = number
    return started


def input_started(node: Any) -> int | None:
    """The number of the input that starts at a node of autograd's graph, if that is one of ``copies``."""
    return getattr(node, "number_of_input", None)


def made_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those copies as results of operators, not leaves of autograd, where tensors require grad."""
    copied: dict[int, torch.Tensor] = {}
    with torch.enable_grad():
        for group in _sharing(tensors):
            one, requires_grad = tensors[group[0]].detach(), any(tensors[n].requires_grad for n in group)
            if len(group) == 1 and not _has_gaps(one):
                copied[group[0]] = one.requires_grad_(requires_grad).clone()
                continue
            first = min(tensors[n].storage_offset() for n in group)
            span = max(_end(tensors[n]) for n in group) - first
            block = one.as_strided((span,), (1,), first).requires_grad_(requires_grad).clone()
            for n in group:
                t = tensors[n]
                part = block.as_strided(t.shape, t.stride(), t.storage_offset() - first)
                copied[n] = part if t.requires_grad else part.detach()
    return [copied[n] for n in range(len(tensors))]


def _sharing(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of tensors in groups, of which those in one lie in the same stretch of a storage."""
    groups: list[list[int]] = []
    by_storage: dict[Any, list[int]] = {}
    for n, t in enumerate(tensors):
        if t.layout is torch.strided and t.numel() and storage_of(t) is not None:
            by_storage.setdefault((storage_id(t), t.dtype, t.is_conj(), t.is_neg()), []).append(n)
        else:
            groups.append([n])
    for numbers in by_storage.values():
        end = -1
        for n in sorted(numbers, key=lambda n: tensors[n].storage_offset()):
            if tensors[n].storage_offset() >= end:
                groups.append([])
            groups[-1].append(n)
            end = max(end, _end(tensors[n]))
    return groups


def _has_gaps(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and not is_dense(tensor)


def _end(tensor: torch.Tensor) -> int:
    """The entry of its storage after its last one."""
    return int(tensor.storage_offset()) + Layout.of(tensor).span

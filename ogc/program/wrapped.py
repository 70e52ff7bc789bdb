"""Tensors of classes that have operators of their own, such as nested ones, and what they hold."""

from __future__ import annotations

import torch

from ..torch_state.private import inner_tensors


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a tensor that a call made holds, by attribute, if it is of such a class; parameters stay what they are."""
    return {} if isinstance(tensor, torch.nn.Parameter) else inner_tensors(tensor)


def is_content(part: torch.Tensor) -> bool:
    """Whether a part is numbers, full or quantized, and no lengths or indices."""
    return bool(part.numel()) and (part.is_floating_point() or part.is_complex() or part.dtype in _QUANTIZED)


_QUANTIZED = (torch.int8, torch.uint8)


def contents(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with the numbers of one, all the way down: itself, if it is of no such class."""
    parts = parts_of(tensor)
    return [inner for part in parts.values() if is_content(part) for inner in contents(part)] if parts else [tensor]

"""Other inputs for a model, made of given ones such that they stay valid."""

from __future__ import annotations

from typing import Any

import torch

from ..program.program import tensor_leaves
from ..program.structures import InputSpec
from ..torch_state.compare import identical

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class NotVaried(Exception):
    """No other input can be made of the given one; the message says why."""


def another_input(call: Arguments) -> Arguments:
    """Inputs of the same shapes and layouts with other values.

    Floating tensors get random values of the same mean and spread, within the limits of the given ones. Where they
    spread around zero, the mean is that of the other sign. Integers, masks, and floating tensors of whole or of
    infinite numbers are likely ids, labels or masks: those that have the batch's first dimension have their samples
    change places, all in the same way; in a batch of one the entries of the next dimension do. Others stay: they may
    point into what does not change places.

    Raises:
        NotVaried: the values are as before, as all were alike.
    """
    size, generator = _batch_size(call), torch.Generator().manual_seed(1)
    spec, tensors = InputSpec.of(*call)
    varied = [_varied(tensor, size, generator) for tensor in tensors]
    if all(map(identical, tensors, varied)):
        raise NotVaried("no other input could be made of the given one, whose samples are alike")
    return spec.rebuild(varied)


def smaller_batch(call: Arguments) -> Arguments:
    """The first half of the batch: of all tensors whose first dimension is that of the first tensor.

    Raises:
        NotVaried: there is no half, or an input on a GPU may hold positions in the batch, which could be wrong ones.
    """
    size = _batch_size(call)
    if size is None or size < 2:
        raise NotVaried("the inputs have no batch" if size is None else f"the batch has {size} sample")
    if any(_may_point(tensor, size) for tensor in tensor_leaves(call)):
        raise NotVaried("an input on the GPU may hold positions in the batch")

    def halved(tensor: torch.Tensor) -> torch.Tensor:
        if not _has_batch(tensor, size):
            return tensor
        return tensor.detach()[: size // 2].requires_grad_(tensor.requires_grad)

    spec, tensors = InputSpec.of(*call)
    return spec.rebuild([halved(tensor) for tensor in tensors])


def _batch_size(call: Arguments) -> int | None:
    return next((tensor.shape[0] for tensor in tensor_leaves(call) if tensor.dim()), None)


def _has_batch(tensor: torch.Tensor, size: int | None) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _may_point(tensor: torch.Tensor, size: int) -> bool:
    if not tensor.is_cuda or _has_batch(tensor, size) or tensor.is_floating_point() or not tensor.numel():
        return False
    return bool(tensor.max() >= size // 2)


def _varied(tensor: torch.Tensor, size: int | None, generator: torch.Generator) -> torch.Tensor:
    once = _without_repeats(tensor.detach())
    if _is_continuous(once):
        values = _random_like(once, generator)
    elif _has_batch(tensor, size):
        values = once.roll(1, next((d for d, length in enumerate(once.shape) if length > 1), 0))
    else:
        return tensor
    varied = torch.empty_strided(once.shape, once.stride(), dtype=once.dtype, device=once.device).copy_(values)
    return varied.expand(tensor.shape).requires_grad_(tensor.requires_grad)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """An expanded tensor as it was before that."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, min(1, tensor.shape[dimension]))
    return tensor


def _is_continuous(tensor: torch.Tensor) -> bool:
    """Whether the values look as if those between them were as good."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    values = _real(tensor)
    return bool(values.isfinite().all()) and bool((values != values.round()).any())


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values; where the given ones spread around zero, their sum has the other sign, which forwards ask for."""
    values = _real(tensor)
    low, high = values.min(), values.max()
    spread, mean = torch.std_mean(values, correction=0)
    if low < 0 < high and mean.abs() < 3 * spread / values.numel() ** 0.5:
        mean, high = -mean, values.abs().max()
        low = -high
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype).to(values.device)
    fresh = ((noise - noise.mean()) * spread + mean).clamp(low, high)
    return torch.view_as_complex(fresh) if tensor.is_complex() else fresh


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """In a type that everything can be done with."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).to(torch.float64)
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)

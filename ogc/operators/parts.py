"""Batches in parts: what a function gives for the whole, of one part after another."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import torch


def even_parts(samples: int, count: int) -> tuple[slice, ...]:
    """So many slices of a batch; none has over one sample more than another, and the first has the fewest."""
    return tuple(slice(a, b) for a, b in pairwise(samples * k // count for k in range(count + 1)))


def part_by_part(
    parts: Sequence[slice], run: Callable[[slice], torch.Tensor], result: torch.Tensor | None = None
) -> torch.Tensor:
    """What ``run`` gives for each part, joined along the first axis: one part's lives beside the whole.

    That is ``result`` where there are several parts and it is given: it may be what they are made from.
    """
    if len(parts) == 1:
        return run(parts[0])
    for part in parts:
        found = run(part)
        if result is None:
            result = found.new_empty((parts[-1].stop, *found.shape[1:]))
        result[part] = found
        del found
    assert result is not None
    return result


def untouched(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor whose memory is promised but never used.

    Some gradients depend on the shape of an operator's input alone, but their operators ask for a tensor.
    """
    if device.type != "cpu":
        return torch.empty(1, dtype=dtype, device=device).expand(shape)
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype, count=prod(shape)).view(shape)


def has_usual_strides(images: torch.Tensor) -> bool:
    """Whether these are images, a batch of them, and the strides those of a new tensor.

    With a size of one there are others that are contiguous too, and say that the channels come last.
    """
    if images.dim() != 4:
        return False
    _, channels, height, width = images.shape
    return bool(images.stride() == (channels * height * width, height * width, width, 1))

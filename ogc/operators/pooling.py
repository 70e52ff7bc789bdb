"""Pooling, and other operators over windows of positions.

The low-memory variant of max pooling keeps a byte or two for each result, its place in its window, not PyTorch's eight,
and not its input. Kernels go entry by entry, on CUDA too: the same bits for some images as for all. Source:
aten/src/ATen/native/cuda/DilatedMaxPool2d.cu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ..torch_state.private import untraced
from .gpus import is_for_cuda
from .low_memory import Extra, LowMemory, has_usual_strides, is_pytorchs, untouched
from .registry import Operator, register, run_for_bytes
from .weights import Use, Weights

aten = torch.ops.aten

CHUNK_BYTES, CUDA_PARTS = 1 << 20, 16
"""Max pooling takes images of this many bytes of indices at a time, or one; on CUDA, where a part is some kernels, no
more parts than these."""

INDEX_BYTES = 8
"""Of each of PyTorch's indices."""


class MaxPool2d(LowMemory):
    """Max pooling by images."""

    cpu_only = False
    saves_less = True

    def suits(self, *args: Any) -> bool:
        return has_usual_strides(args[0])

    def weights(self, use: Use, plain: Weights) -> Weights:
        samples, channels, positions = _sizes(use)
        at_once = _images_at_once(use)
        indices = INDEX_BYTES * positions * (1 + channels * at_once)
        shapes = use.args[0].nbytes // max(1, samples) * at_once if is_for_cuda(use.args[0]) else 0
        return replace(plain, scratch_bytes=indices, working_bytes=plain.working_bytes + indices + shapes)

    def extra(self, use: Use) -> tuple[Extra, Extra]:
        samples, channels, positions = _sizes(use)
        parts = -(-samples // _images_at_once(use))
        indices = INDEX_BYTES * samples * channels * positions
        # Indices are written, shifted and narrowed; in the backward widened and shifted.
        return Extra(8 + 3 * parts, 3 * indices), Extra(8 + 3 * parts, 3 * indices)


def _sizes(use: Use) -> tuple[int, int, int]:
    """Samples, channels, and positions of the result."""
    samples, channels = use.args[0].shape[:2]
    return samples, channels, use.result_bytes // max(1, use.args[0].element_size() * samples * channels)


def _images_at_once(use: Use) -> int:
    return images_at_once(_sizes(use), is_for_cuda(use.args[0]))


class _Function(torch.autograd.Function):
    """``aten.max_pool2d``, a few images at a time: their indices are turned into places within windows, and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: list[int], *settings: Any) -> torch.Tensor:
        defaults: tuple[Any, ...] = ([], [0, 0], [1, 1], False)  # stride, padding, dilation, ceil_mode
        ctx.settings = kernel, *settings, *defaults[len(settings) :]
        ctx.like = x.shape, x.dtype, x.device
        ctx.given = 1 + len(settings)
        none: torch.Tensor = aten.max_pool2d_with_indices.default(x[:0], *ctx.settings)[0]  # for its shape
        result = x.new_empty((len(x), *none.shape[1:]))
        starts, span = _windows(x.shape[3], result, *ctx.settings[:-1])
        places = torch.empty_like(result, dtype=_least_type(span))
        buffer = starts.new_empty((images_at_once(result.shape, is_for_cuda(x)), *result.shape[1:]))
        for part, indices in _parts(buffer, len(x)):
            aten.max_pool2d_with_indices.out(x[part], *ctx.settings, out=result[part], indices=indices)
            places[part].copy_(indices.sub_(starts))
        ctx.save_for_backward(places)
        return result

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        shape, dtype, device = ctx.like
        starts, _ = _windows(shape[3], places, *ctx.settings[:-1])
        nothing = (None,) * ctx.given
        backward = aten.max_pool2d_with_indices_backward
        if is_pytorchs(gradient):
            x = _shaped(shape, dtype, device)
            return (backward.default(gradient, x, *ctx.settings, places + starts), *nothing)
        gradient = gradient.contiguous()
        result = gradient.new_empty(shape)
        buffer = starts.new_empty((images_at_once(places.shape, is_for_cuda(places)), *places.shape[1:]))
        x = _shaped((len(buffer), *shape[1:]), dtype, device)
        for part, indices in _parts(buffer, len(places)):
            indices.copy_(places[part]).add_(starts)
            given = gradient[part], x[: len(indices)], *ctx.settings, indices
            backward.grad_input(*given, grad_input=result[part])
        return (result, *nothing)


def _shaped(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor for its shape alone. CUDA has no memory that is promised only, and copies what is expanded."""
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.new_empty(shape) if is_for_cuda(empty) else untouched(shape, dtype, device)


def _windows(
    width: int, result: torch.Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> tuple[torch.Tensor, int]:
    """For each position of the result the index at which its window starts in a plane so wide; and a window's span."""
    down, right = (
        torch.arange(size, device=result.device) * (stride or kernel)[k] - padding[k]
        for k, size in zip((0, -1), result.shape[2:], strict=True)
    )
    span = (kernel[0] - 1) * dilation[0] * width + (kernel[-1] - 1) * dilation[-1]
    return down[:, None] * width + right, span


def _least_type(most: int) -> torch.dtype:
    """The smallest type of integers from 0 to ``most``."""
    types = (torch.uint8, torch.int16, torch.int32, torch.int64)
    return next(dtype for dtype in types if most <= torch.iinfo(dtype).max)


def images_at_once(shape: Sequence[int], on_cuda: bool = False) -> int:
    """For how many images max pooling, whose result has this shape, has indices at a time."""
    images = CHUNK_BYTES // max(1, INDEX_BYTES * prod(shape[1:]))
    return max(1, min(shape[0], max(images, -(-shape[0] // CUDA_PARTS) if on_cuda else 1)))


def _parts(buffer: torch.Tensor, count: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Chunks of so many images, with room in the buffer for each."""
    for first in range(0, count, len(buffer)):
        last = min(count, first + len(buffer))
        yield slice(first, last), buffer[: last - first]


register(
    Operator(
        aten.max_pool2d.default,
        MaxPool2d(aten.max_pool2d.default, _Function),
        copies_strided_gradients=True,
    ),
    # What their kernels copy depends on how images are laid out.
    *run_for_bytes(aten.im2col.default, aten.col2im.default),
    *run_for_bytes(*(getattr(aten, f"upsample_nearest{n}d").vec for n in (1, 2, 3))),
    *run_for_bytes(
        *(getattr(aten, f"upsample_{kind}").vec for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d"))
    ),
    Operator(aten.avg_pool2d.default, copies_strided_gradients=True),
    Operator(aten.adaptive_avg_pool2d.default, copies_strided_gradients=True),
)

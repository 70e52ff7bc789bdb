"""Convolution and its low-memory form.

That computes the weights' gradient first and lets go of its saved input. The input's gradient is made for a few images
at a time, in the place of the result's where both have one shape and nobody else holds that. On a CPU the forward goes
by images, too. On CUDA it runs where the input's gradient may take that place. On an H200 half of the kinds that were
tried gave other bits in parts, and run whole.
"""

from __future__ import annotations

from typing import Any

import torch

from ...torch_state.private import untraced
from ..cuda.on_meta import is_for_cuda
from ..holders import is_ours, is_pytorchs
from ..low_memory import Extra, LowMemory
from ..parts import even_parts, has_usual_strides
from ..registry import Operator, register
from ..slices.axes import of_first
from ..weights import Use, Weights
from .parts import convolved, gradient_of_images, is_written_over, parts_of
from .workspace import hidden_bytes, hidden_bytes_of_backward, weigh, weigh_in_parts

aten = torch.ops.aten


class Convolution(LowMemory):
    """Convolution by images."""

    cpu_only = False
    starts = 2
    has_two_phases = True

    def suits(self, *args: Any) -> bool:
        return has_usual_strides(args[0]) and (not is_for_cuda(args[0]) or is_written_over(*args[:9]))

    def weights(self, use: Use, plain: Weights) -> Weights:
        return weigh_in_parts(use, plain)

    def extra(self, use: Use) -> tuple[Extra, Extra]:
        parts = len(parts_of(*use.args[:9]))
        image = use.args[0].numel() * use.args[0].element_size()
        # Part by part, results are copied into the whole; the gradients of weight and input are two calls.
        backward = Extra(1 + 2 * (parts - 1), 2 * image * (parts > 1))
        if is_for_cuda(use.args[0]):
            return Extra(), backward
        return Extra(2 * (parts - 1), 2 * use.result_bytes * (parts > 1)), backward


class _Function(torch.autograd.Function):
    """``aten.convolution``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
    ) -> torch.Tensor:
        ctx.settings = (None if bias is None else list(bias.shape), *settings)
        ctx.save_for_backward(x, weight)
        parts = even_parts(len(x), 1) if is_for_cuda(x) else parts_of(x, weight, bias, *settings)
        return convolved(parts, x, weight, bias, *settings)

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        in_place = is_ours(gradient)
        of_input, *of_weights = ctx.needs_input_grad[:3]
        nothing = (None,) * (len(ctx.settings) - 1)
        x, weight = ctx.saved_tensors
        if is_pytorchs(gradient):
            found = aten.convolution_backward.default(gradient, x, weight, *ctx.settings, [of_input, *of_weights])
            return (*found, *nothing)
        weights = (None, None)
        if any(of_weights):
            weights = aten.convolution_backward.default(gradient, x, weight, *ctx.settings, [False, *of_weights])[1:]
        parts, like = parts_of(x, weight, *ctx.settings), (x.shape, x.dtype, x.device)
        over = in_place and gradient.shape == x.shape and gradient.stride() == x.stride()
        ctx.maybe_clear_saved_tensors()  # not where the graph is retained
        del x
        images = gradient_of_images(parts, gradient, like, weight, *ctx.settings, over=over) if of_input else None
        return (images, *weights, *nothing)


def _on_meta(image: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, *settings: Any) -> torch.Tensor:
    stride, padding, dilation, transposed, *_ = settings
    is_short = not len(stride) == len(padding) == len(dilation) == image.dim() - 2
    if is_short or transposed or not _is_plain(image) or not _is_plain(kernel):
        return aten.convolution.default(image, kernel, bias, *settings)
    sizes = zip(image.shape[2:], kernel.shape[2:], stride, padding, dilation, strict=True)
    steps = [(size + 2 * pad - skip * (width - 1) - 1) // step + 1 for size, width, step, pad, skip in sizes]
    return image.new_empty((image.shape[0], kernel.shape[0], *steps))


def _backward_on_meta(
    gradient: torch.Tensor, image: torch.Tensor, kernel: torch.Tensor, bias_sizes: list[int] | None, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    if not _is_plain(image) or not _is_plain(kernel):
        return aten.convolution_backward.default(gradient, image, kernel, bias_sizes, *rest)
    shapes = (image.shape, kernel.shape, bias_sizes or ())
    return tuple(gradient.new_empty(shape) if want else None for shape, want in zip(shapes, rest[-1], strict=True))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether nobody takes it for channels_last."""
    return tensor.is_contiguous() and tensor.shape[1] > 1


register(
    Operator(
        aten.convolution.default,
        Convolution(aten.convolution.default, _Function),
        along=of_first(lambda args, axis: 0 if axis == 0 and args[0].dim() == args[1].dim() else None),
        is_heavy=True,
        weigh=weigh,
        hidden_bytes=hidden_bytes,
        on_meta=_on_meta,
        is_convolution=True,
        copies_strided_gradients=True,
        runs_uncompiled=True,
    ),
    Operator(
        aten.convolution_backward.default,
        is_convolution=True,
        hidden_bytes=hidden_bytes_of_backward,
        on_meta=_backward_on_meta,
    ),
)

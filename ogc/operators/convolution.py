"""Convolution and its low-memory variant, and what both allocate on a CPU underneath the dispatcher.

The low-memory variant computes the weights' gradient first and releases its saved input. It makes the input's gradient
a few images at a time, in the place of the result's where both have one shape and nobody else holds that. On a CPU the
forward goes by images, too. On CUDA it runs where the input's gradient may take that place; on an H200 half of the
kinds that were tried gave other bits in parts, and run whole.

oneDNN copies operands to blocked layouts and results back. For large dense convolutions of stride 1 there is a rule,
read off the allocator for torch 2.11 to 2.15; what several threads sum the gradient of the weight in is found by
running it. Others (patches, strides, dilation, groups, few channels, images of a few positions) are run, each by
itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..torch_state.allocator import allocated_bytes, peak_bytes
from ..torch_state.private import untraced
from .convolution_parts import convolved, gradient_of_images, is_product, is_written_over, parts_of
from .gpus import is_for_cuda
from .low_memory import Extra, LowMemory, even_parts, has_usual_strides, is_ours, is_pytorchs
from .registry import Operator, register
from .weights import Use, Weights

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


CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
"""For which cuDNN's settings say what float32 is computed in."""

_WITHOUT_RULE_FLOPS = 2e7
"""Below this, a call is measured: in less time than matters, as few networks have many such."""

_SUMS_FLOPS = 5e8
"""Per thread, of a call that is run for what threads sum in."""

_NEGLIGIBLE = 0.005
"""Of what the gradient of the weight takes."""

_OF_INPUT = (True, False, False)
"""Which gradients are wanted, where it is that of the input alone."""


@dataclass(frozen=True)
class ConvolutionBytes:
    """Most bytes allocated at once: of the input, which its gradient takes as well; in the forward beside the result;
    and for the gradients of the weight and of the input, those included.
    """

    image: int
    scratch: int
    weights_phase: int
    input_phase: int

    @property
    def backward(self) -> int:
        """For both gradients in one call, which finds that of the input first."""
        return max(self.input_phase, self.image + self.weights_phase) if self.input_phase else self.weights_phase


def weigh(use: Use) -> Weights:
    """The weights of PyTorch's convolution on a CPU."""
    sizes = use.once(_of_the_whole)
    working = sizes.backward if use.weights.gradients else 0
    return replace(use.weights, scratch_bytes=sizes.scratch, working_bytes=working)


def weigh_in_parts(use: Use, plain: Weights) -> Weights:
    """The weights of a low-memory convolution: the gradient of the weight first, then that of the input in parts."""
    wanted = {gradient.argument for gradient in plain.gradients}
    if is_for_cuda(use.args[0]):
        sizes = _in_parts_on_cuda(use, plain, wanted)
    else:
        sizes = _in_parts(use.once(_of_the_whole), use.args, use.result_bytes, use.weights.forward_flops, use.can_run)
    weights = replace(plain, scratch_bytes=sizes.scratch)
    if is_written_over(*use.args[:9]):
        weights = weights.written_over()
    if 0 not in wanted:
        return weights
    if 1 not in wanted:
        return replace(weights, working_bytes=sizes.input_phase)
    late = _bytes_of([use.args[n] for n in (1, 2) if n in wanted]) + sizes.input_phase
    return replace(weights, working_bytes=sizes.weights_phase, late_bytes=late)


def hidden_bytes(args: Sequence[Any], outputs: list[torch.Tensor]) -> int:
    """Bytes that a low-memory convolution allocates at once beyond its result, by the rule."""
    result = _bytes_of(outputs)
    return _in_parts(_sizes(args, result), args, result).scratch


def hidden_bytes_of_backward(args: Sequence[Any], outputs: list[torch.Tensor]) -> int:
    """Bytes that its backward allocates at once beyond its results, from those of ``aten.convolution_backward``."""
    result = _bytes_of(args[:1])
    sizes = _in_parts(_sizes(args[1:], result, wanted=args[-1]), args[1:], result)
    late = _bytes_of(args[2:3]) + (sizes.input_phase if args[-1][0] else 0)
    return max(sizes.weights_phase, late) - _bytes_of(outputs)


def _of_the_whole(use: Use) -> ConvolutionBytes:
    wanted = [n in {gradient.argument for gradient in use.weights.gradients} for n in range(3)]
    return _sizes(use.args, use.result_bytes, use.weights.forward_flops, use.can_run, wanted)


def _sizes(
    args: Sequence[Any], result: int, flops: int = 0, can_run: bool = False, wanted: Sequence[bool] = _OF_INPUT
) -> ConvolutionBytes:
    """By the rule, or by running the call where that is wrong.

    ``args`` are those of ``aten.convolution`` (the sizes of a bias will do), ``result`` the bytes of its result,
    ``flops`` those of its forward; ``wanted`` says whether the input, the weight and the bias get gradients.
    """
    if can_run and not _has_rule(args[0], args[1], args[3:9], flops):
        return _measured(args, wanted)
    sizes = _estimated(args[0], args[1], result, args[3:9])
    if can_run and wanted[1]:
        sizes = _with_partial_sums(sizes, args, result, flops)
    return replace(
        sizes,
        input_phase=sizes.input_phase if wanted[0] else 0,
        weights_phase=sizes.weights_phase if wanted[1] or wanted[2] else 0,
    )


def _in_parts(
    whole: ConvolutionBytes, args: Sequence[Any], result: int, flops: int = 0, can_run: bool = False
) -> ConvolutionBytes:
    """Bytes of a low-memory convolution, which runs forward and makes the gradient of its input part by part."""
    parts = parts_of(*args[:9])
    if len(parts) == 1:
        return whole
    samples = max(part.stop - part.start for part in parts)
    of_part = result * samples // len(args[0])
    part = _sizes((args[0][:samples], *args[1:]), of_part, flops * samples // len(args[0]), can_run)
    inputs = whole.image + part.input_phase if whole.input_phase else 0
    return replace(whole, scratch=of_part + part.scratch, input_phase=inputs)


def _in_parts_on_cuda(use: Use, plain: Weights, wanted: Collection[int]) -> ConvolutionBytes:
    """The same on CUDA, where the forward is PyTorch's; without what cuDNN works in."""
    parts = parts_of(*use.args[:9])
    image, weights = _bytes_of(use.args[:1]), _bytes_of([use.args[n] for n in (1, 2) if n in wanted])
    of_part = image * max(part.stop - part.start for part in parts) // len(use.args[0])
    return ConvolutionBytes(image, plain.scratch_bytes, weights, image + of_part)


def _estimated(image: torch.Tensor, kernel: torch.Tensor, result: int, settings: Any) -> ConvolutionBytes:
    """By the rule, from operands, the bytes of the result and the operator's arguments from the stride on."""
    x, w = _bytes_of([image]), _bytes_of([kernel])
    if is_product(image, kernel, settings):
        return ConvolutionBytes(x, 0, w, x)
    copies = 3 if any(step > 1 for step in settings[0]) else 2
    weights = w + result if kernel.shape[1] < 16 else max(x + result + w, 2 * w)
    return ConvolutionBytes(x, max(x + w, result), weights, max(x + result + w, copies * x))


def _has_rule(image: torch.Tensor, kernel: torch.Tensor, settings: Any, flops: int) -> bool:
    """Whether the estimate is right for a call with so many FLOPs."""
    stride, _, dilation, transposed, _, groups = settings
    if is_product(image, kernel, settings):
        return True
    return (
        flops > _WITHOUT_RULE_FLOPS
        and image.dtype == torch.float32
        and image.dim() == 4
        and all(t.is_contiguous() for t in (image, kernel))
        and not transposed
        and all(step == 1 for step in (*stride, *dilation, groups))
        and all(size <= 3 for size in kernel.shape[2:])
        and all(size > (3 if len(image) > 1 else 6) for size in image.shape[2:])  # on less, some copy no weights
        and all(channels % 16 == 0 for channels in kernel.shape[:2])
    )


def _with_partial_sums(sizes: ConvolutionBytes, args: Sequence[Any], result: int, flops: int) -> ConvolutionBytes:
    """The estimate, and what threads allocate that each sum the gradient of the weight over a part of the batch.

    That depends on the machine, and is found by running the call, a long one with fewer images, unless a sum per thread
    is negligible.
    """
    image, kernel, bias = args[:3]
    threads = torch.get_num_threads()
    if threads == 1 or threads * kernel.numel() * kernel.element_size() < _NEGLIGIBLE * sizes.weights_phase:
        return sizes
    few = image[: max(1, int(len(image) * threads * _SUMS_FLOPS / flops))]
    shape = aten.convolution.default(few.to("meta"), kernel.to("meta"), None, *args[3:]).shape
    run = _backward_bytes((few, *args[1:]), torch.ones(shape, dtype=few.dtype), [False, True, bias is not None])
    sums = run - _estimated(few, kernel, result // len(image) * len(few), args[3:9]).weights_phase
    return replace(sizes, weights_phase=sizes.weights_phase + max(0, sums))


@torch.no_grad()
def _measured(args: Sequence[Any], wanted: Sequence[bool]) -> ConvolutionBytes:
    """By running the call, forward and backward, for those gradients of input, weight and bias that are wanted."""
    image, kernel, bias = args[:3]
    results: list[torch.Tensor] = []
    convolve = partial(aten.convolution.default, image, kernel, bias, *args[3:])
    peak, result = allocated_bytes(lambda: results.append(convolve()), "cpu")
    gradient = torch.ones_like(results.pop())
    weights = _backward_bytes(args, gradient, [False, *wanted[1:]])
    inputs = _backward_bytes(args, gradient, [wanted[0], False, False])
    return ConvolutionBytes(_bytes_of([image]), peak - result, weights, inputs)


@torch.no_grad()
def _backward_bytes(args: Sequence[Any], gradient: torch.Tensor, wanted: list[bool]) -> int:
    """Most bytes allocated while the gradients of the input, the weight and the bias are made, as far as wanted."""
    image, kernel, bias = args[:3]
    sizes = None if bias is None else list(bias.shape)
    backward = partial(aten.convolution_backward.default, gradient, image, kernel, sizes, *args[3:], wanted)
    return peak_bytes(backward, "cpu") if any(wanted) else 0


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


register(
    Operator(
        aten.convolution.default,
        Convolution(aten.convolution.default, _Function),
        weigh=weigh,
        on_meta=_on_meta,
        copies_strided_gradients=True,
    ),
    Operator(
        aten.convolution_backward.default,
        on_meta=_backward_on_meta,
    ),
)

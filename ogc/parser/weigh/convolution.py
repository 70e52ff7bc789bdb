"""What a convolution on a CPU allocates beside its operands, underneath the dispatcher.

oneDNN copies operands to blocked layouts of its own and results back; which it chooses depends on shapes and on the
machine. For large dense convolutions of stride 1 there is a rule, read off the allocator for torch 2.11 to 2.15;
only what several threads sum the gradient of the weight in is found by running it. Others (patches, strides,
dilation, groups, few channels) have no rule: they are run, each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...operators.convolution import is_product, parts_of
from ...torch_state.allocator import allocated_bytes

_WITHOUT_RULE_FLOPS = 2e7  # below this, a call is measured: in less time than matters, as few networks have many such
_SUMS_FLOPS = 5e8  # per thread, of a call that is run for what threads sum in
_NEGLIGIBLE = 0.005


@dataclass(frozen=True)
class ConvolutionBytes:
    """Most bytes allocated at once.

    Attributes:
        image: those of the input, which its gradient takes as well.
        scratch: in the forward, beside the result.
        weights_phase: for the gradient of the weight, that included.
        input_phase: for the gradient of the input, that included.
    """

    image: int
    scratch: int
    weights_phase: int
    input_phase: int

    @property
    def backward(self) -> int:
        """For both gradients in one call, which finds that of the input first."""
        return max(self.input_phase, self.image + self.weights_phase) if self.input_phase else self.weights_phase


def estimated(image: torch.Tensor, kernel: torch.Tensor, result: int, settings: Any) -> ConvolutionBytes:
    """By the rule, from operands, the bytes of the result and the operator's arguments from the stride on."""
    x, w = (t.numel() * t.element_size() for t in (image, kernel))
    if is_product(image, kernel, settings):
        return ConvolutionBytes(x, 0, w, x)
    copies = 3 if any(step > 1 for step in settings[0]) else 2
    weights = w + result if kernel.shape[1] < 16 else max(x + result + w, 2 * w)
    return ConvolutionBytes(x, max(x + w, result), weights, max(x + result + w, copies * x))


def in_parts(
    whole: ConvolutionBytes, args: Sequence[Any], result: int, weigh: Callable[[Sequence[Any], int], ConvolutionBytes]
) -> ConvolutionBytes:
    """The same for a lean convolution, which runs forward and makes the gradient of its input part by part.

    Args:
        whole: of the whole batch at once.
        args: those of ``aten.convolution``; the sizes of a bias will do.
        result: bytes of its result.
        weigh: gives those of a part, from the same for that.
    """
    parts = parts_of(*args)
    if len(parts) == 1:
        return whole
    samples = max(part.stop - part.start for part in parts)
    result = result * samples // len(args[0])
    part = weigh((args[0][:samples], *args[1:]), result)
    return replace(
        whole, scratch=result + part.scratch, input_phase=whole.image + part.input_phase if whole.input_phase else 0
    )


def has_rule(image: torch.Tensor, kernel: torch.Tensor, settings: Any, flops: int) -> bool:
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
        and all(channels % 16 == 0 for channels in kernel.shape[:2])
    )


def with_partial_sums(sizes: ConvolutionBytes, args: Sequence[Any], result: int, flops: int) -> ConvolutionBytes:
    """The estimate, and what threads allocate that each sum the gradient of the weight over a part of the batch.

    How they divide the work depends on the machine. It is found by running the call, unless a sum per thread is
    nothing beside the rest; a long one with fewer images, which may be too few to be divided as the batch is.

    Args:
        sizes: by the rule.
        args: those of ``aten.convolution``.
        result: bytes of its result.
        flops: of the forward.
    """
    image, kernel, bias = args[:3]
    threads = torch.get_num_threads()
    if threads == 1 or threads * kernel.numel() * kernel.element_size() < _NEGLIGIBLE * sizes.weights_phase:
        return sizes
    few = image[: max(1, int(len(image) * threads * _SUMS_FLOPS / flops))]
    shape = torch.ops.aten.convolution.default(few.to("meta"), kernel.to("meta"), None, *args[3:]).shape
    run = _backward_bytes((few, *args[1:]), torch.ones(shape, dtype=few.dtype), [False, True, bias is not None])
    sums = run - estimated(few, kernel, result // len(image) * len(few), args[3:9]).weights_phase
    return replace(sizes, weights_phase=sizes.weights_phase + max(0, sums))


@torch.no_grad()
def measured(args: Sequence[Any], wanted: Sequence[bool]) -> ConvolutionBytes:
    """By running the call, forward and backward.

    Args:
        args: those of ``aten.convolution``.
        wanted: whether the input, the weight and the bias get gradients.
    """
    image, kernel, bias = args[:3]
    found: list[torch.Tensor] = []

    def forward() -> None:
        found.append(torch.ops.aten.convolution.default(image, kernel, bias, *args[3:]))

    peak, result = allocated_bytes(forward, "cpu")
    gradient = torch.ones_like(found.pop())
    weights = _backward_bytes(args, gradient, [False, *wanted[1:]])
    inputs = _backward_bytes(args, gradient, [wanted[0], False, False])
    return ConvolutionBytes(image.numel() * image.element_size(), peak - result, weights, inputs)


@torch.no_grad()
def _backward_bytes(args: Sequence[Any], gradient: torch.Tensor, wanted: list[bool]) -> int:
    """Most bytes allocated while the gradients of the input, the weight and the bias are made, as far as wanted."""
    image, kernel, bias = args[:3]
    sizes = None if bias is None else list(bias.shape)
    found: list[Any] = []

    def backward() -> None:
        found[:] = torch.ops.aten.convolution_backward.default(gradient, image, kernel, sizes, *args[3:], wanted)

    return allocated_bytes(backward, "cpu", found.clear)[0] if any(wanted) else 0

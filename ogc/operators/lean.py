"""Operators that compute what PyTorch's do, bit for bit, with a backward that needs less memory.

Forward kernels are PyTorch's own. The backwards differ in what is alive at once:

* elementwise operators write their input's gradient over their result's, where that gradient is whole and
  nobody else's;
* batch norm does the same on a CPU, a few channels at a time (its kernel works channel by channel);
* convolution on a CPU takes a few images at a time, but for the weights' gradient, which it computes first, and lets
  go of its saved input before it allocates the input's gradient;
* max pooling on a CPU keeps a byte or two for each result, its place in its window, instead of PyTorch's eight, and
  not its input, of which its backward needs the shape alone.

Batch norm that is run again where its statistics are still there does not compute them anew.

With ``create_graph=True`` every backward is PyTorch's, so that it can be differentiated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from ..torch_state.private import (
    OpOverload,
    base_of,
    is_view,
    overload_name,
    schema_of,
    storage_holders,
    tensor_holders,
)
from .convolution import convolved, gradient_of_images, parts_of, untouched

aten = torch.ops.aten

CHUNK_BYTES = 1 << 20
"""Batch norm's backward takes channels of this many bytes at a time, or one; max pooling images of as many indices."""

INDEX_BYTES = 8
"""Of each of PyTorch's indices."""


@dataclass(frozen=True, eq=False)
class Lean:
    """A drop-in for ``operator``; ``kind`` names the way its backward saves memory."""

    operator: OpOverload
    function: type[torch.autograd.Function]
    kind: str  # "elementwise", "batch_norm", "convolution" or "max_pool2d"

    @property
    def __name__(self) -> str:
        return schema_of(self.operator).name.split("::")[1]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if not self.pays(*args):
            return self.operator(*args[: len(schema_of(self.operator).arguments)], **keywords)
        return self.function.apply(*args, *([keywords] if self.kind == "elementwise" else []))

    def pays(self, *args: Any) -> bool:
        """Whether a call with these arguments runs the lean function, not the operator itself."""
        x = args[0]
        starts = args[:2] if self.kind == "convolution" else args[:1]
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in starts):
            return False
        if self.kind == "batch_norm":
            return bool(args[5]) and _by_channel(x) and channels_at_once(x) < x.shape[1]
        if self.kind in ("convolution", "max_pool2d"):
            return x.dim() == 4 and _has_usual_strides(x)
        # Autograd rebases views that are written in place for its own operators only.
        return not (is_view(x) and schema_of(self.operator).is_mutable)


def _has_usual_strides(images: torch.Tensor) -> bool:
    """Whether the strides are those of a new tensor.

    With a size of one there are others that are contiguous too, and say that the channels come last.
    """
    _, channels, height, width = images.shape
    return bool(images.stride() == (channels * height * width, height * width, width, 1))


def lean_operator(target: Any, device: torch.device) -> Lean | None:
    """The drop-in for an operator on a device, if there is one."""
    _holders_when_ours()  # counted now, outside of any backward
    found = OPERATORS.get(target)
    if found is None or (found.kind != "elementwise" and device.type != "cpu"):
        return None
    return found


def plain_operator(target: Any) -> Any:
    """PyTorch's operator, where a drop-in stands for it."""
    return target.operator if isinstance(target, Lean) else target


def out_of_place(target: Any) -> Any:
    """The operator without its underscore, lean if ``target`` is; None if it has none, or no such twin."""
    operator = plain_operator(target)
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return None
    name, overload = schema_of(operator).name.split("::")[1], overload_name(operator)
    packet = getattr(aten, name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or overload not in packet.overloads():
        return None
    twin = getattr(packet, overload)
    kinds = [[str(argument.type) for argument in schema_of(one).arguments] for one in (twin, operator)]
    if kinds[0] != kinds[1]:  # pow_(Tensor, Scalar) and pow(Scalar, Tensor) are both called Scalar
        return None
    return OPERATORS.get(twin, twin) if isinstance(target, Lean) else twin


# -- elementwise ----------------------------------------------------------------------------------------


def _elementwise(operator: OpOverload, backward: Any, saves: str, *constants: Any) -> Lean:
    """An operator whose backward is ``backward(gradient, saved, *constants)``, element by element."""
    again_differentiable = _silu_backward if backward is aten.silu_backward else backward.default

    class Elementwise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
            result: torch.Tensor = operator(x, **keywords)
            if schema_of(operator).is_mutable:
                ctx.mark_dirty(x)
            ctx.keywords = keywords
            ctx.save_for_backward(result if saves == "result" else x)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            in_place = _is_ours(gradient)
            arguments = (gradient, *ctx.saved_tensors, *constants)
            if torch.is_grad_enabled():
                return again_differentiable(*arguments, **ctx.keywords), None
            if in_place and gradient.stride() == arguments[1].stride():
                return backward.grad_input(*arguments, **ctx.keywords, grad_input=gradient), None
            return backward.default(*arguments, **ctx.keywords), None

    return Lean(operator, Elementwise, "elementwise")


def _silu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What autograd uses where silu's own backward, which has no derivative, would not do."""
    sigmoid = x.sigmoid()
    return gradient * sigmoid * (1 + x * (1 - sigmoid))


# -- batch norm -----------------------------------------------------------------------------------------


class _BatchNorm(torch.autograd.Function):
    """``aten.batch_norm`` in training, or again with the statistics that it had."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn: bool,
        *statistics: torch.Tensor,
    ) -> torch.Tensor:
        if statistics and repeats_exactly(x, weight, bias):
            result = _normalized(x, weight, bias, *statistics)
        else:
            result, *statistics = aten.native_batch_norm.default(
                x, weight, bias, mean, variance, training, momentum, eps
            )
        ctx.eps = eps
        ctx.save_for_backward(x, weight, *statistics)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        in_place = _is_ours(gradient)
        needs = ctx.needs_input_grad[:3]
        x, weight, mean, invstd = ctx.saved_tensors
        # A gradient that is not contiguous takes another kernel, which adds up in another order, in no more memory.
        if torch.is_grad_enabled() or not gradient.is_contiguous():
            found = _batch_norm_backward(gradient, x, weight, mean, invstd, ctx.eps, needs)
            return (*found, *(None,) * 8)
        # Each part of the gradient is read before it is overwritten.
        result = gradient if in_place and gradient.stride() == x.stride() else torch.empty_like(x)
        step = channels_at_once(x)
        of_weights = []
        for first in range(0, x.shape[1], step):
            part = slice(first, first + step)
            scale = None if weight is None else weight[part]
            given = gradient[:, part].contiguous(), x[:, part].contiguous()
            found = _batch_norm_backward(*given, scale, mean[part], invstd[part], ctx.eps, needs)
            result[:, part] = found[0]
            of_weights.append(found[1:])
            del found, given
        joined = [torch.cat(parts) if parts[0] is not None else None for parts in zip(*of_weights, strict=True)]
        return (result, *joined, *(None,) * 8)


def _normalized(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor, invstd: torch.Tensor
) -> torch.Tensor:
    """Batch norm by known statistics: the kernel scales by 1 / sqrt(1 + 0) * (weight * invstd), all else is as ever."""
    scale = invstd if weight is None else weight * invstd
    result: torch.Tensor = aten.native_batch_norm.default(
        x, scale, bias, mean, torch.ones_like(invstd), False, 0.0, 0.0
    )[0]
    return result


def repeats_exactly(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *settings: Any) -> bool:
    """Whether known statistics give the bits of batch norm in training."""
    given = [t for t in (weight, bias) if t is not None]
    alike = all(t.dtype == x.dtype and t.is_contiguous() for t in given)
    return alike and x.device.type == "cpu" and _by_channel(x) and _normalizes_bitwise(x.dtype)


@cache
def _normalizes_bitwise(dtype: torch.dtype) -> bool:
    """Tried once, with and without parameters, with planes of whole and of broken vectors."""
    if dtype not in (torch.float32, torch.float64):
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for positions in (1, 3, 16, 64, 83):
            x = torch.randn(4, 8, positions + 1, dtype=dtype, device="cpu", generator=generator) * 3 + 1
            values = [torch.randn(8, dtype=dtype, device="cpu", generator=generator) for _ in range(2)]
            for weight, bias in (values, (None, None)):
                result, *statistics = aten.native_batch_norm.default(x, weight, bias, None, None, True, 0.1, 1e-5)
                if not torch.equal(result, _normalized(x, weight, bias, *statistics)):
                    return False
    return True


def _batch_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
    needs: tuple[bool, bool, bool],
) -> tuple[Any, ...]:
    found: tuple[Any, ...] = aten.native_batch_norm_backward.default(
        gradient, x, weight, None, None, mean, invstd, True, eps, needs
    )
    return found


def channels_at_once(x: torch.Tensor) -> int:
    """How many channels of ``x`` batch norm's backward handles at a time."""
    return min(x.shape[1], max(1, CHUNK_BYTES * x.shape[1] // (x.numel() * x.element_size())))


def _by_channel(tensor: torch.Tensor) -> bool:
    """Whether batch norm's kernel for this layout works channel by channel: channels first, some positions each."""
    return tensor.dim() > 2 and tensor.is_contiguous() and tensor.stride(1) > 1


# -- convolution ----------------------------------------------------------------------------------------


class _Convolution(torch.autograd.Function):
    """``aten.convolution``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
    ) -> torch.Tensor:
        ctx.settings = (None if bias is None else list(bias.shape), *settings)
        ctx.save_for_backward(x, weight)
        return convolved(parts_of(x, weight, bias, *settings), x, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_input, *of_weights = ctx.needs_input_grad[:3]
        nothing = (None,) * (len(ctx.settings) - 1)
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = aten.convolution_backward.default(gradient, x, weight, *ctx.settings, [of_input, *of_weights])
            return (*found, *nothing)
        weights = (None, None)
        if any(of_weights):
            weights = aten.convolution_backward.default(gradient, x, weight, *ctx.settings, [False, *of_weights])[1:]
        parts, like = parts_of(x, weight, *ctx.settings), (x.shape, x.dtype, x.device)
        ctx.maybe_clear_saved_tensors()  # not where the graph is retained
        del x
        images = gradient_of_images(parts, gradient, like, weight, *ctx.settings) if of_input else None
        return (images, *weights, *nothing)


# -- max pooling ----------------------------------------------------------------------------------------


class _MaxPool2d(torch.autograd.Function):
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
        buffer = starts.new_empty((images_at_once(result.shape), *result.shape[1:]))
        for part, indices in _parts(buffer, len(x)):
            aten.max_pool2d_with_indices.out(x[part], *ctx.settings, out=result[part], indices=indices)
            places[part].copy_(indices.sub_(starts))
        ctx.save_for_backward(places)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        shape, dtype, device = ctx.like
        starts, _ = _windows(shape[3], places, *ctx.settings[:-1])
        nothing = (None,) * ctx.given
        backward = aten.max_pool2d_with_indices_backward
        if torch.is_grad_enabled():
            x = untouched(shape, dtype, device)
            return (backward.default(gradient, x, *ctx.settings, places + starts), *nothing)
        gradient = gradient.contiguous()
        result = gradient.new_empty(shape)
        buffer = starts.new_empty((images_at_once(places.shape), *places.shape[1:]))
        x = untouched((len(buffer), *shape[1:]), dtype, device)
        for part, indices in _parts(buffer, len(places)):
            indices.copy_(places[part]).add_(starts)
            given = gradient[part], x[: len(indices)], *ctx.settings, indices
            backward.grad_input(*given, grad_input=result[part])
        return (result, *nothing)


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


def images_at_once(shape: Sequence[int]) -> int:
    """For how many images max pooling, whose result has this shape, has indices at a time."""
    return max(1, min(shape[0], CHUNK_BYTES // max(1, INDEX_BYTES * prod(shape[1:]))))


def _parts(buffer: torch.Tensor, count: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of so many images, with room in the buffer for each."""
    for first in range(0, count, len(buffer)):
        last = min(count, first + len(buffer))
        yield slice(first, last), buffer[: last - first]


# -- whose gradient it is ---------------------------------------------------------------------------------


def _is_ours(gradient: torch.Tensor) -> bool:
    """Whether the gradient covers its storage once and nobody but the calling backward holds either.

    Call it before anything else in a backward: it compares with the reference counts of a gradient that
    nobody else holds, at that place. They differ between releases of PyTorch, so they are looked up once. A
    gradient that came through a view, such as that of a linear layer on more than two dimensions, has a base
    that only it holds.
    """
    holders = _holders(gradient)
    return bool(holders) and holders in _holders_when_ours()


def _holders(gradient: torch.Tensor) -> tuple[int, ...]:
    base = base_of(gradient)
    whole = gradient.is_contiguous() and (base is None or base.numel() == gradient.numel())
    if type(gradient) is not torch.Tensor or not whole:
        return ()
    # By its address: ``untyped_storage()`` would leave a holder behind, and autograd would no longer add in place.
    holders = sys.getrefcount(gradient), tensor_holders(gradient), storage_holders(gradient)
    if base is None:
        return holders
    return (*holders, sys.getrefcount(base), tensor_holders(base))


@cache
def _holders_when_ours() -> tuple[tuple[int, ...], ...]:
    """The counts of a gradient that is no view, and of one that is."""
    found = []

    def look(gradient: torch.Tensor) -> None:
        found.append(_holders(gradient))

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            look(gradient)
            return gradient

    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad((Probe.apply(x * 2) * 3).sum(), x)
        torch.autograd.grad((Probe.apply(x * 2).view(2, 1) * 3).sum(), x)
    return tuple(found)


OPERATORS: dict[Any, Lean] = {
    lean.operator: lean
    for lean in (
        _elementwise(aten.relu.default, aten.threshold_backward, "result", 0),
        _elementwise(aten.relu_.default, aten.threshold_backward, "result", 0),
        _elementwise(aten.sigmoid.default, aten.sigmoid_backward, "result"),
        _elementwise(aten.tanh.default, aten.tanh_backward, "result"),
        _elementwise(aten.silu.default, aten.silu_backward, "input"),
        _elementwise(aten.gelu.default, aten.gelu_backward, "input"),
        Lean(aten.batch_norm.default, _BatchNorm, "batch_norm"),
        Lean(aten.convolution.default, _Convolution, "convolution"),
        Lean(aten.max_pool2d.default, _MaxPool2d, "max_pool2d"),
    )
}
"""Drop-ins by the operator that they stand for."""

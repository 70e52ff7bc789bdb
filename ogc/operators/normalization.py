"""Batch norm and its like.

Batch norm's low-memory variant writes its input's gradient over its result's, a few channels at a time. On CUDA, where
the number of channels may choose a kernel, each kind of call is tried once. Recomputed on a CPU where its statistics
are still there, it does not compute them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ..program.program import without_autocast
from ..torch_state.private import untraced
from .gpus import is_for_cuda, runs_kernels_of_cuda
from .low_memory import Extra, LowMemory, is_ours, is_pytorchs
from .registry import Operator, like, ones_like, register, run_for_bytes
from .weights import Use, Weights

aten = torch.ops.aten

CHUNK_BYTES, CUDA_PARTS = 1 << 20, 16
"""Batch norm's backward takes channels of this many bytes at a time, or one; on CUDA, where a part is a dozen kernels,
no more parts than these."""

_MOST_TRAINING, _MOST_EVALUATING, _MOST_ENTRIES = 880_801, 65_535, 2**31 - 1
_LEAST_EPS = 1e-5
"""cuDNN's limits: samples, entries, and what is added to variances."""

_REPEATED_SHARE = 0.5
"""Time of batch norm whose statistics are known, on a CPU: measured 0.2 to 0.6 of the whole."""


class BatchNorm(LowMemory):
    """Batch norm by channels."""

    cpu_only = False
    writes_over = True
    takes_notes = True
    copies_strided_gradients = False

    def suits(self, *args: Any) -> bool:
        x = args[0]
        if not (args[5] and _by_channel(x) and channels_at_once(x) < x.shape[1]):
            return False
        return not x.is_cuda or _is_bitwise_on_cuda(_Kind.of(*args))

    def weights(self, use: Use, plain: Weights) -> Weights:
        x = use.args[0]
        chunk = channels_at_once(x) * x.numel() * x.element_size() // x.shape[1]
        return replace(
            plain.written_over(),
            working_bytes=use.result_bytes + 4 * chunk,
            repeat_seconds=_REPEATED_SHARE * plain.forward_seconds if repeats_exactly(*use.args) else None,
        )

    def extra(self, use: Use) -> tuple[Extra, Extra]:
        channels, step = use.args[0].shape[1], channels_at_once(use.args[0])
        # Channels of the operands are copied out, those of the result in; each part has parameters of its own.
        return Extra(), Extra(10 * -(-channels // step), 6 * use.result_bytes)


class _Function(torch.autograd.Function):
    """``aten.batch_norm`` in training, or again with the statistics that it had, which come last."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, *settings: Any) -> torch.Tensor:
        statistics: Sequence[torch.Tensor] = settings[6:]
        is_cudnns = _is_cudnns(x, weight, bias, *settings[:5])
        if statistics and repeats_exactly(x, weight, bias):
            result = _normalized(x, weight, bias, *statistics)
        else:
            result, *statistics = _normalize(is_cudnns, x, weight, bias, *settings[:5])
        ctx.eps, ctx.is_cudnns = settings[4], is_cudnns
        ctx.save_for_backward(x, weight, *statistics)
        return result

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        in_place = is_ours(gradient)
        x, weight, *statistics = ctx.saved_tensors

        def found(gradient: torch.Tensor, x: torch.Tensor, weight: Any, *known: Any) -> Any:
            return _gradients(ctx.is_cudnns, ctx.needs_input_grad[:3], gradient, x, weight, *known, ctx.eps)

        # A gradient that is not contiguous takes another kernel, which adds up in another order, in no more memory.
        if is_pytorchs(gradient) or not gradient.is_contiguous():
            return (*found(gradient, x, weight, *statistics), *(None,) * 8)
        result = gradient if in_place and gradient.stride() == x.stride() else torch.empty_like(x)
        return (result, *_in_parts(found, result, gradient, x, weight, *statistics), *(None,) * 8)


def _in_parts(
    found: Callable[..., Any], result: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, *by_channel: Any
) -> list[torch.Tensor | None]:
    """The gradients of the parameters; that of ``x`` is written to ``result``, which may be the gradient itself."""
    step = channels_at_once(x)
    of_weights = []
    for first in range(0, x.shape[1], step):
        part = slice(first, first + step)  # which is read before it is overwritten
        of_part = (None if t is None else t[part] for t in by_channel)
        result[:, part], *others = found(gradient[:, part].contiguous(), x[:, part].contiguous(), *of_part)
        of_weights.append(others)
    return [torch.cat(parts) if parts[0] is not None else None for parts in zip(*of_weights, strict=True)]


def _is_cudnns(x: torch.Tensor, *settings: Any) -> bool:
    """Whether PyTorch leaves batch norm with these arguments to cuDNN."""
    return runs_kernels_of_cuda(x) and cudnn_normalizes(x, *settings)


def _normalize(is_cudnns: bool, *settings: Any) -> Sequence[torch.Tensor]:
    """The result, mean and deviation; cuDNN keeps nothing else of what has its channels first."""
    if not is_cudnns:
        found: Sequence[torch.Tensor] = aten.native_batch_norm.default(*settings)
        return found
    *found, reserve = aten.cudnn_batch_norm.default(*settings)
    if reserve.numel():
        raise NotImplementedError("cuDNN keeps a reserve for batch norm here")
    return found


def _gradients(
    is_cudnns: bool, wanted: Sequence[bool], gradient: torch.Tensor, x: torch.Tensor, weight: Any, *known: Any
) -> tuple[torch.Tensor | None, ...]:
    *statistics, eps = known
    if is_cudnns:
        reserve = x.new_empty(0, dtype=torch.uint8)
        found = aten.cudnn_batch_norm_backward.default(x, gradient, weight, None, None, *statistics, eps, reserve)
        return tuple(one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True))
    given = gradient, x, weight, None, None, *statistics, True, eps, wanted
    return tuple(aten.native_batch_norm_backward.default(*given))


def cudnn_normalizes(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> bool:
    """Whether PyTorch leaves batch norm on CUDA with these arguments to cuDNN."""
    return (
        torch.backends.cudnn.enabled
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in (x.dtype, weight.dtype)
        and (x.dtype != torch.float16 or weight.dtype == torch.float32)
        and ((mean is not None and var is not None) or (training and mean is None and var is None))
        and x.dim() >= 3
        and x.shape[0] <= (_MOST_TRAINING if training else _MOST_EVALUATING)
        and x.numel() < _MOST_ENTRIES
        and eps >= _LEAST_EPS
    )


class _Kind(NamedTuple):
    """What calls on CUDA must share to be computed alike."""

    device: torch.device
    shape: torch.Size
    dtypes: tuple[torch.dtype | None, ...]  # of the input, and of the parameters
    eps: float
    flags: tuple[bool, ...]

    @staticmethod
    def of(x: torch.Tensor, weight: Any, bias: Any, *settings: Any) -> _Kind:
        dtypes = tuple(None if t is None else t.dtype for t in (x, weight, bias))
        cudnn = torch.backends.cudnn
        return _Kind(x.device, x.shape, dtypes, settings[4], (cudnn.enabled, cudnn.deterministic))


@cache
def _is_bitwise_on_cuda(kind: _Kind) -> bool:
    """Whether parts give the bits of the whole: tried on numbers of its own; not where there is no room for that."""
    generator = torch.Generator(kind.device).manual_seed(0)

    def numbers(shape: Sequence[int], dtype: torch.dtype | None) -> Any:
        return dtype and torch.randn(shape, dtype=dtype, device=kind.device, generator=generator)

    try:
        with torch.no_grad(), without_autocast():
            x, gradient = (numbers(kind.shape, kind.dtypes[0]) for _ in range(2))
            weight, bias = (numbers(kind.shape[1:2], dtype) for dtype in kind.dtypes[1:])
            settings = x, weight, bias, None, None, True, 0.1, kind.eps
            is_cudnns = _is_cudnns(*settings)
            statistics = _normalize(is_cudnns, *settings)[1:]
            found = partial(_gradients, is_cudnns, [True, weight is not None, bias is not None])
            by_channel = weight, *statistics
            whole = found(gradient, x, *by_channel, kind.eps)
            ours = _in_parts(lambda *given: found(*given, kind.eps), gradient, gradient, x, *by_channel)
            pairs = zip(whole, (gradient, *ours), strict=True)
            return all(torch.equal(one, other) for one, other in pairs if one is not None and other is not None)
    except (torch.cuda.OutOfMemoryError, NotImplementedError):
        return False


def _normalized(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor, invstd: torch.Tensor
) -> torch.Tensor:
    """Batch norm by known statistics: the kernel scales by 1 / sqrt(1 + 0) * (weight * invstd), all else is as ever."""
    scale = invstd if weight is None else weight * invstd
    return aten.native_batch_norm.default(x, scale, bias, mean, torch.ones_like(invstd), False, 0.0, 0.0)[0]


def repeats_exactly(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *settings: Any) -> bool:
    """Whether known statistics give the bits of batch norm in training."""
    alike = all(t is None or (t.dtype == x.dtype and t.is_contiguous()) for t in (weight, bias))
    return alike and x.device.type == "cpu" and not is_for_cuda(x) and _by_channel(x) and _normalizes_bitwise(x.dtype)


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


def channels_at_once(x: torch.Tensor) -> int:
    """How many channels of ``x`` batch norm's backward handles at a time."""
    channels = CHUNK_BYTES * x.shape[1] // (x.numel() * x.element_size())
    return min(x.shape[1], max(1, channels, -(-x.shape[1] // CUDA_PARTS) if is_for_cuda(x) else 1))


def _by_channel(tensor: torch.Tensor) -> bool:
    """Whether batch norm's kernel for this layout works channel by channel: channels first, some positions each."""
    return tensor.dim() > 2 and tensor.is_contiguous() and tensor.stride(1) > 1


def _on_meta(image: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    wide = torch.promote_types(image.dtype, torch.float32)
    mean, deviation = (image.new_empty(image.shape[1], dtype=wide) for _ in range(2))
    return like(image), mean, deviation


def _backward_on_meta(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    parameter = image if weight is None else weight
    wanted = rest[-1][1:]
    return like(gradient), *(parameter.new_empty(image.shape[1]) if want else None for want in wanted)


def _with_result_twice(use: Use) -> Weights:
    """As read off the allocator for torch 2.11 to 2.15: the backward allocates its result twice."""
    return replace(use.weights, working_bytes=use.weights.working_bytes + use.result_bytes)


register(
    Operator(
        aten.batch_norm.default,
        BatchNorm(aten.batch_norm.default, _Function),
        live=((3, 4), 5),
        weigh=_with_result_twice,
        copies_strided_gradients=True,
    ),
    # Made of batch norm.
    Operator(aten.instance_norm.default, live=((3, 4), 5), weigh=_with_result_twice, returns_view=True),
    Operator(aten.native_batch_norm.default, on_meta=_on_meta),
    Operator(aten.native_batch_norm_backward.default, on_meta=_backward_on_meta),
    # Copies what is not laid out as it computes.
    Operator(aten.group_norm.default, to_run_with=ones_like),
    *run_for_bytes(aten.prod.dim_int, aten.cumprod.default, aten.kthvalue.default, aten.quantile.scalar),
    *run_for_bytes(aten.cosine_similarity.default, aten.bilinear.default),
)

"""Operators of which PyTorch makes others for tensors on CUDA than for those on a CPU.

Sources, in aten/src/ATen/native: Normalization.cpp (``_select_batch_norm_backend``), Dropout.cpp
(``is_fused_kernel_acceptable``), layer_norm.cpp (``rms_norm_symint``), cuda/layer_norm_kernel.cu, cuda/Activation.cpp
(``log_sigmoid_forward``). Meta tensors are held against fake ones on CUDA in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .gpus import CudaKernel, Gpu

aten = torch.ops.aten

_MOST_TRAINING, _MOST_EVALUATING, _MOST_ENTRIES = 880_801, 65_535, 2**31 - 1
_LEAST_EPS = 1e-5
"""cuDNN's limits: samples, entries, and what is added to variances."""


def batch_norm_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel | None:
    """cuDNN's, which keeps a reserve besides: empty but in channels_last, whose bytes are not documented."""
    return CudaKernel(_cudnn_batch_norm, is_of_operators=False) if cudnn_normalizes(*args[:8]) else None


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


def _cudnn_batch_norm(*args: Any) -> torch.Tensor:
    result: torch.Tensor = aten.cudnn_batch_norm.default(*args[:8])[0]
    return result


def dropout_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel | None:
    """One kernel with a mask of a byte for each entry."""
    x, p, train = args
    return CudaKernel(_native_dropout, is_of_operators=False) if train and 0 < p < 1 and x.numel() else None


def _native_dropout(*args: Any) -> torch.Tensor:
    result: torch.Tensor = aten.native_dropout.default(*args)[0]
    return result


def rms_norm_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel | None:
    """One kernel that keeps what it divided each row by."""
    x, _, weight, *_ = (*args, None)
    is_composite = x.is_complex() or (weight is not None and weight.dtype != x.dtype) or _has_channels_last(x)
    return None if is_composite else CudaKernel(_rms_norm, is_of_operators=False)


def _has_channels_last(x: torch.Tensor) -> bool:
    forms = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in forms and x.is_contiguous(memory_format=forms[x.dim()]) and not x.is_contiguous()


def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: Any = None) -> Any:
    return _RmsNorm.apply(x, weight, len(shape))


class _RmsNorm(torch.autograd.Function):
    """Allocates and saves as the kernels do, and gives results without content."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        rows = (*x.shape[: x.dim() - dims], *(1,) * dims)
        ctx.save_for_backward(x, x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32)), weight)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, _, weight = ctx.saved_tensors
        gradient.contiguous()
        wanted = ctx.needs_input_grad
        return torch.empty_like(x) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None, None


def log_sigmoid_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel:
    """A kernel that keeps nothing for the backward but its input."""
    return CudaKernel(_LogSigmoid.apply, is_of_operators=False)


class _LogSigmoid(torch.autograd.Function):
    """Allocates and saves as the kernels do, and gives results without content."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(gradient)

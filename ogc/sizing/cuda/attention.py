"""Attention on CUDA: which kernel PyTorch chooses, and what that allocates.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.h and attention.cpp; of what kernels
allocate unseen flash_attn/flash_api.cpp, attention_backward.cu, mem_eff_attention/kernel_backward.h. The efficient
kernel's bytes were measured on an H200; those of flash and cuDNN were not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...operators.gpus import Gpu
from ...torch_state.private import sdp_order
from . import CudaKernel

aten = torch.ops.aten

MATH, FLASH, EFFICIENT, CUDNN = range(4)
"""How PyTorch numbers the kernels."""

_HALF = (torch.float16, torch.bfloat16)
_DEFAULT_ORDER = (FLASH, EFFICIENT, MATH, CUDNN)
_SHARES_HEADS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""Whether the efficient kernel takes fewer heads of keys than of queries, by what PyTorch's documentation says."""
_CUDNN_FIRST = (CUDNN, FLASH, EFFICIENT, MATH)


class Attention(NamedTuple):
    """A call of ``scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def requires_grad(self) -> bool:
        """Whether gradients go to query, key or value."""
        return any(t.requires_grad for t in self.tensors)


def attention_on_cuda(args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel | None:
    """The kernel of a call; None if it is computed by plain operators."""
    call = Attention(*args, **kwargs)
    kernel = chosen(call, gpu)
    if kernel == FLASH:
        return CudaKernel(partial(_run, kernel=_flash), working_bytes=of_flash(call))
    if kernel == EFFICIENT:
        return CudaKernel(partial(_run, kernel=_efficient), working_bytes=of_efficient(call, gpu))
    if kernel == CUDNN:
        return CudaKernel(partial(_run, kernel=_cudnn), working_bytes=_cudnn_backward(call))
    return None


def chosen(call: Attention, gpu: Gpu) -> int:
    """The number of the kernel that PyTorch chooses: the first in its order that is enabled and takes the call."""
    cuda = torch.backends.cuda
    usable = {
        FLASH: lambda: cuda.flash_sdp_enabled() and _takes_flash(call, gpu),
        EFFICIENT: lambda: cuda.mem_efficient_sdp_enabled() and _takes_efficient(call, gpu),
        CUDNN: lambda: cuda.cudnn_sdp_enabled() and _takes_cudnn(call, gpu),
        MATH: cuda.math_sdp_enabled,
    }
    return next((kernel for kernel in _order(gpu) if usable[kernel]()), MATH)


def _order(gpu: Gpu) -> tuple[int, ...]:
    order = tuple(number for number in sdp_order() if number in range(4))
    version = torch.backends.cudnn.version()
    is_preferred = gpu.capability[0] in (9, 10) and (version is None or version > 91500)
    # On a GPU available that prefers cuDNN, PyTorch itself puts it first when attention first runs.
    is_default = order == _DEFAULT_ORDER or (order == _CUDNN_FIRST and torch.cuda.is_available())
    return (_CUDNN_FIRST if is_preferred else _DEFAULT_ORDER) if is_default else order


def _takes_flash(call: Attention, gpu: Gpu) -> bool:
    width = call.query.shape[-1]
    few_registers = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)
    trains = not (call.requires_grad and few_registers) or width <= 192 or (width > 224 and not call.dropout_p)
    return (
        _is_dense(call, ignores_width_of_one=True)
        and gpu.capability >= (8, 0)
        and call.mask is None
        and call.query.dtype in _HALF
        and width == call.value.shape[-1] <= 256
        and (not call.is_causal or call.query.shape[-2] == call.key.shape[-2])
        and trains
    )


def _takes_efficient(call: Attention, gpu: Gpu) -> bool:
    dtype = call.query.dtype
    types = (*_HALF, torch.float32) if gpu.capability >= (8, 0) else (torch.float16, torch.float32)
    aligned = _alignment(dtype, gpu)
    return (
        _is_dense(call)
        and dtype in types
        and (_SHARES_HEADS or call.query.shape[1] == call.key.shape[1])
        and not call.query.shape[-1] % aligned
        and not call.value.shape[-1] % aligned
        and (gpu.capability < (8, 0) or not any(t.storage_offset() % aligned for t in call.tensors))
    )


def _alignment(dtype: torch.dtype, gpu: Gpu) -> int:
    """In entries: of the widths that matrix products on tensor cores take."""
    is_half, least = dtype in _HALF, 4 if gpu.capability >= (8, 0) else 1
    has_cores = gpu.capability >= (8, 0) or (gpu.capability >= (7, 0) and is_half)
    return max(least, 8 if is_half else 4) if has_cores else least


def _takes_cudnn(call: Attention, gpu: Gpu) -> bool:
    query, key, value = call.tensors
    return (
        _is_dense(call, ignores_width_of_one=True)
        and gpu.capability >= (8, 0)
        and query.dtype in _HALF
        and not any(t.shape[-1] > 128 or t.shape[-1] % 8 for t in (query, value))
        and (call.dropout_p * 16).is_integer()
        and key.shape[2] > 1
        and (not call.dropout_p or query.shape[2] > 1)
        and _fits(call.mask, query, key)
        and (not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled())
    )


def _fits(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether cuDNN takes a mask."""
    if mask is None:
        return True
    whole = (*query.shape[:3], key.shape[2])[-mask.dim() :]
    sizes_fit = mask.dim() in (2, 4) and all(a in (1, b) for a, b in zip(mask.shape, whole, strict=True))
    return sizes_fit and not mask.requires_grad


def _is_dense(call: Attention, ignores_width_of_one: bool = False) -> bool:
    """What all kernels but plain operators want."""
    query, key, value = call.tensors
    if not query.dim() == key.dim() == value.dim() == 4 or len({t.dtype for t in call.tensors}) > 1:
        return False
    heads, shared = query.shape[1], key.shape[1]
    has_heads = shared == value.shape[1] and (heads % shared == 0 if call.enable_gqa else heads == shared)
    is_flat = all(t.stride(-1) == 1 for t in call.tensors) or (ignores_width_of_one and query.shape[-1] == 1)
    return (
        query.shape[0] == key.shape[0] == value.shape[0]
        and has_heads
        and query.shape[-1] == key.shape[-1] > 0
        and query.shape[2] > 0 < key.shape[2]
        and is_flat
        and (call.mask is None or call.mask.stride(-1) == 1)
    )


# -- what each runs, on whatever tensors -----------------------------------------------------------------------


def _run(*args: Any, kernel: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = kernel(Attention(*args, **kwargs))
    return result


def _flash(call: Attention) -> torch.Tensor:
    width = call.query.shape[-1]
    padded = [_padded(t, 8) for t in call.tensors]
    scale = 1 / math.sqrt(width) if call.scale is None else call.scale
    settings = (call.dropout_p, call.is_causal, False)
    result = aten._scaled_dot_product_flash_attention.default(*padded, *settings, scale=scale)[0]
    return result if width % 8 == 0 else result[..., :width]


def _efficient(call: Attention) -> torch.Tensor:
    bias = None if call.mask is None else _aligned_bias(call.mask, call)
    settings = (call.requires_grad, call.dropout_p, call.is_causal)
    query, *shared = call.tensors
    times = query.shape[1] // call.key.shape[1]
    # Shared heads count as if they were repeated first, which may be more than is so.
    key, value = (t if times == 1 else t.repeat_interleave(times, 1) for t in shared)
    kernel = aten._scaled_dot_product_efficient_attention.default
    return kernel(query, key, value, bias, *settings, scale=call.scale)[0]


def _cudnn(call: Attention) -> torch.Tensor:
    settings = (call.requires_grad, call.dropout_p, call.is_causal, False)
    bias = None if call.mask is None else _added(call.mask, call.query.dtype)
    return aten._scaled_dot_product_cudnn_attention.default(*call.tensors, bias, *settings, scale=call.scale)[0]


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _aligned_bias(mask: torch.Tensor, call: Attention) -> torch.Tensor:
    """A mask as the efficient kernel takes it: if it is not aligned, whole, for each head, and padded."""
    bias = _added(mask, call.query.dtype).expand(*call.query.shape[:3], call.key.shape[2])
    if bias.stride(-1) == 1 and not any(stride % 16 for stride in bias.stride()[:-1]):
        return bias
    return _padded(bias, 16, always=True)[..., : bias.shape[-1]]


def _padded(tensor: torch.Tensor, multiple: int, always: bool = False) -> torch.Tensor:
    rest = tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, multiple - rest)) if rest or always else tensor


# -- what their backwards allocate unseen ----------------------------------------------------------------------


def of_flash(call: Attention) -> int:
    """Bytes that its backward allocates beside gradients."""
    batch, heads, length, width = call.query.shape
    width = _up(width, 8)
    rows = batch * heads * _up(length, 128)
    found = 4 * rows * (1 + _up(width, 32 if width <= 128 else 64))  # sums of the softmax, and the query's in float32
    if call.key.shape[1] != heads:  # gradients of key and value for each head
        found += 2 * batch * heads * call.key.shape[2] * width * call.query.element_size()
    if not call.query.transpose(1, 2).is_contiguous():  # result and gradient, laid out as the query, are copied
        found += 2 * batch * heads * length * width * call.query.element_size()
    return found


def of_efficient(call: Attention, gpu: Gpu) -> int:
    """Bytes that its backward allocates beside gradients."""
    batch, heads, length, width = call.query.shape
    wide, keys = call.value.shape[-1], call.key.shape[2]
    is_half, widest = call.query.dtype in _HALF, max(width, wide)
    # As PyTorch's build generates the kernels: wide ones take larger blocks where there is shared memory for them.
    high = 128 if widest > 64 and gpu.capability[1] == 0 and gpu.capability[0] in (8, 9, 10) else 64
    in_registers = is_half and widest <= 128 and (widest <= 64 or high == 128)
    broad = 128 if in_registers and widest > 64 else 64
    parts = -(-length // high) * -(-width // broad) * (4 + high * broad)
    if is_half and not in_registers:
        splits = max(1, min(-(-keys // broad), 200 // (batch * heads)))
        parts += splits * _up(keys, broad) * (_up(width, high) + _up(wide, high))
    sums = 4 * batch * heads * length
    products = 0 if is_half else sums * wide  # of result and gradient, which halves are multiplied in the kernel
    return sums + max(4 * batch * heads * _up(parts, 4), products + sums)


def _cudnn_backward(call: Attention) -> int:
    """cuDNN does not say: the query's gradient in float32 and the sums of the softmax, as flash's."""
    batch, heads, length, width = call.query.shape
    return 4 * batch * heads * length * (1 + width)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

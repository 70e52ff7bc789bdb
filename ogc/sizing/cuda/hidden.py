"""Bytes that kernels on CUDA allocate underneath the dispatcher, in the forward and in the backward.

Read off PyTorch's sources. The sums of rows and the gradient of an embedding were measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...operators.gpus import Gpu
from .attention import Attention, of_efficient, of_flash


def of_group_norm(args: Sequence[Any]) -> tuple[int, int]:
    """Factors and sums for each sample and channel. Source: aten/src/ATen/native/cuda/group_norm_kernel.cu."""
    x, groups, weight, *_ = (*args, None)
    samples, channels, *places = x.shape
    if x.numel() == samples * channels or not places:
        return 0, 0
    each = samples * channels * torch.promote_types(x.dtype, torch.float32).itemsize
    of_groups = 2 * each * groups // channels
    return 2 * each, (3 if weight is not None else 2) * each + of_groups


SMALL_LOOKUP = 3072
"""Indices up to which the gradient of an embedding is added up without sorting them."""

_SEGMENT = 10
"""Rows that one thread adds up of an embedding's gradient."""


def of_embedding(args: Sequence[Any]) -> tuple[int, int]:
    """Sorted indices, their places, and sums of rows: at most, as it depends on the indices.

    Sources: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu.
    """
    weight, indices, *_ = args
    number = indices.numel()
    if number <= SMALL_LOOKUP:
        return 0, 0
    segments = min(number, weight.shape[0])
    parts = number // _SEGMENT + segments
    sums = parts * weight.shape[1] * torch.promote_types(weight.dtype, torch.float32).itemsize
    return 0, indices.element_size() * (2 * number + 3 * segments + parts) + sums


_MOST_THREADS, _WARP = 512, 32
"""Of a block, and that work in step."""

_VALUES = 16, 256
"""The fewest that a thread adds up where blocks share a sum, and from which on they do."""


def of_sum(args: Sequence[Any], gpu: Gpu) -> int:
    """Partial sums of blocks that share those of a matrix's columns, such as a bias's gradient; else nothing.

    For 8192 rows of 3072, an H200 takes 132 MiB, more than the matrix. Source: aten/src/ATen/native/cuda/Reduce.cuh.
    """
    x, dims, *_ = args
    first = sorted(dim % x.dim() for dim in dims or ()) if x.dim() else []
    rows = math.prod(x.shape[: len(first)])
    if first != list(range(len(first))) or not x.is_contiguous() or not 0 < rows < x.numel():
        return 0
    columns = x.numel() // rows
    vector = math.gcd(columns, 4)
    most = _MOST_THREADS // vector
    width, height = (min(most, 2 ** (size.bit_length() - 1)) for size in (columns // vector, rows))
    height = min(height, most // min(width, _WARP))
    width = min(width, most // height)
    fewest, shared_from = _VALUES
    if rows < min(fewest * height, shared_from):
        return 0
    values, grid = -(-rows // height), -(-columns // vector // width)
    blocks_at_once = gpu.processors * (gpu.threads // (width * height))
    if values < shared_from or grid > blocks_at_once:
        return 0
    blocks = max(min(-(-blocks_at_once // grid), -(-values // fewest)), -(-values // shared_from))
    added_up_in = torch.promote_types(x.dtype, torch.float32)
    return columns * blocks * width * vector * added_up_in.itemsize if blocks > 1 else 0


aten = torch.ops.aten


def hidden_in_forward_and_backward(target: Any, args: Sequence[Any]) -> tuple[int, int]:
    """Bytes that the kernels of a call, and of its backward, allocate unseen."""
    return _BY_CALL[target](args) if target in _BY_CALL else (0, 0)


_BY_CALL: dict[Any, Callable[[Sequence[Any]], tuple[int, int]]] = {
    aten.embedding.default: of_embedding,
    aten.group_norm.default: of_group_norm,
}


def hidden_in_sums(function: Any, args: Sequence[Any], gpu: Gpu | None) -> int:
    """Bytes that an operator allocates unseen if it is a sum."""
    return of_sum(args, gpu) if gpu is not None and function is aten.sum.dim_IntList else 0


def hidden_in_backward(function: Any, args: Sequence[Any], gpu: Gpu | None) -> int:
    """Bytes that an operator of a backward allocates unseen, by its own arguments."""
    if gpu is None or function not in _IN_BACKWARD:
        return 0
    return _IN_BACKWARD[function](args, gpu)


def _embedding_backward(args: Sequence[Any], gpu: Gpu) -> int:
    gradient, indices, rows, *_ = args
    return of_embedding((gradient.new_empty((rows, gradient.shape[-1]), device="meta"), indices))[1]


def _group_norm_backward(args: Sequence[Any], gpu: Gpu) -> int:
    _, x, _, _, weight, _, _, _, groups, _ = args
    return of_group_norm((x, groups, weight))[1]


def _flash_backward(args: Sequence[Any], gpu: Gpu) -> int:
    _, query, key, value, _, _, _, _, _, _, dropout_p, is_causal, *_ = args
    return of_flash(Attention(query, key, value, None, dropout_p, is_causal))


def _efficient_backward(args: Sequence[Any], gpu: Gpu) -> int:
    _, query, key, value, mask, _, _, _, _, dropout_p, _, is_causal, *_ = (*args, False)
    return of_efficient(Attention(query, key, value, mask, dropout_p, is_causal), gpu)


_IN_BACKWARD: dict[Any, Callable[[Sequence[Any], Gpu], int]] = {
    aten.sum.dim_IntList: of_sum,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}

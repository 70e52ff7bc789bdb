"""Bytes that kernels on CUDA allocate underneath the dispatcher: during the forward, and during the backward.

Read off PyTorch's sources, not measured on CUDA yet. What the dispatcher sees needs no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


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
    """Indices sorted, with where they come from, and sums of rows: at most, as it depends on the indices.

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

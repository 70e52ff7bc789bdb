"""Whether two tensors are the same, and how far they are apart if not."""

from __future__ import annotations

import math

import torch


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and content, NaN being equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b)) or bool(_same_entries(a, b).all())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest distance between two entries; infinite where there is no telling."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    apart = ~_same_entries(a, b)
    return _largest((_wide(a) - _wide(b))[apart].abs().nan_to_num(math.inf))


def difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """In words, how ``a`` differs from ``b``."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} of shape {tuple(a.shape)} instead of {b.dtype} of shape {tuple(b.shape)}"
    return f"off by up to {distance(a, b):.3g}, where the largest entry is {_largest(_wide(b).abs()):.3g}"


def _same_entries(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | ((a != a) & (b != b))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.max()) if tensor.numel() else 0.0

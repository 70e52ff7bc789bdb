"""Whether two tensors are the same, and how far they are apart if not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from zlib import crc32

import torch

from .private import inner_tensors, sparse_parts
from .ranks import is_spread


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and content, if they have any, NaN being equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta != b.is_meta or is_spread(a) != is_spread(b):
        return False
    if is_spread(a):  # the parts of other ranks are theirs to compare
        return all(map(same_bits, inner_tensors(a).values(), inner_tensors(b).values()))
    if a.is_meta:
        return True
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return a.layout is b.layout and all(map(same_bits, dense_parts(a), dense_parts(b)))
    return bool(torch.equal(a, b)) or bool(_same_entries(a, b).all())


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse one is made of; itself, dense, of any other layout."""
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor.detach())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.detach().values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.detach().values()
    return (tensor.detach().to_dense(),)


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same shape and dtype hold the same bits, signs of zeros and NaNs too."""
    if a.is_meta and b.is_meta:
        return True
    if a.layout is not torch.strided:
        return a.layout is b.layout and all(map(identical, dense_parts(a), dense_parts(b)))
    return torch.equal(_as_integers(a), _as_integers(b))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    return tensor.view(_INTEGERS[tensor.element_size()])


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """An integer tensor that tells tensors of the same layout apart by their bits and order.

    It sums over the rows and the columns of a square, which reads the content twice and copies next to nothing.
    """
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    flat = tensor.view(-1) if tensor.is_contiguous() else _as_it_lies(tensor)
    each, entries = 8 // flat.element_size(), flat.numel()
    odd = entries % each
    whole = flat[: entries - odd] if odd else flat
    words = (whole.clone() if whole.storage_offset() % each else whole).view(torch.int64)
    width = math.isqrt(words.numel())
    square = words[: width * width].view(width, width)
    sums = [square.sum(0), square.sum(1)]
    if width * width < words.numel():
        sums.append(words[width * width :])
    if odd:
        sums.append(flat[entries - odd :].view(_INTEGERS[flat.element_size()]).to(torch.int64))
    each_sum = torch.cat(sums)
    return each_sum.mul_(torch.arange(1, each_sum.numel() + 1, device=each_sum.device).mul_(_FACTOR)).sum()


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The entries as a vector in the order of memory; only what has gaps or repeats entries is copied."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).contiguous().view(-1)


_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd: weights of different entries differ in all bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest distance between two entries; infinite where there is no telling."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    a, b = a.to_dense(), b.to_dense()
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


LOOKED_AT = 1 << 13
"""So many entries at the start and at the end of a tensor are looked at: other random numbers differ everywhere."""


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A number that tells what was drawn into tensors on the CPU from what was drawn into others."""
    found = 0
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.numel():
            entries = _as_it_lies(tensor.detach())
            for part in (entries[:LOOKED_AT], entries[-LOOKED_AT:]):
                found = crc32(part.contiguous().view(torch.uint8).numpy().data, found)
    return found

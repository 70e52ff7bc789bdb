"""Convolutions on a CPU, a few images at a time: the bits of PyTorch's kernels, a part of their temporaries.

oneDNN copies the images to a layout of its own, and what it makes of them back. Of the whole batch at once
these copies are as large as the operands; of a few images they are small, and stay in the caches, which makes
up for the kernel's, made anew for each part. Images do not depend on each other, but which kernel is taken, and
in which order it adds up, may depend on how many there are. So each kind of call is tried once, whole and in
parts, before it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.backends import mkldnn

from ...program.program import without_autocast
from ..parts import even_parts, part_by_part, untouched

aten = torch.ops.aten

PART_BYTES = 2 << 20
"""Images, and what is made of them, that each thread is to be given at a time; no less than of the kernel."""

_LEAST_FOR_ONEDNN = 16
"""Images from which on one thread leaves a pointwise convolution to it. Source: as for :func:`is_product`."""

_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class _Kind:
    """What two calls must share to be computed alike."""

    shapes: tuple[tuple[int, ...], ...]  # of the images and the kernel
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    biased: bool
    settings: tuple[Any, ...]
    threads: int
    backend: tuple[Any, ...]


def parts_of(images: torch.Tensor, kernel: torch.Tensor, bias: object, *settings: Any) -> tuple[slice, ...]:
    """Slices of the batch that one after another give the bits of all images at once.

    One for the whole batch, if it is small or they do not. The first call of a kind takes as long as it does to
    convolve all images twice, forward and backward.

    Args:
        images: (samples, channels, ...), as all arguments those of ``aten.convolution``.
        bias: or its sizes; None if there is none.
    """
    given = (images, kernel)
    if images.device.type not in ("cpu", "meta") or not all(type(t) in _TYPES for t in given):
        return (slice(0, len(images)),)
    kind = _Kind(
        shapes=tuple(tuple(t.shape) for t in given),
        strides=tuple(t.stride() for t in given),
        dtypes=tuple(t.dtype for t in given),
        biased=bias is not None,
        settings=tuple(tuple(s) if isinstance(s, (list, tuple)) else s for s in settings),
        threads=torch.get_num_threads(),
        backend=(mkldnn.enabled, mkldnn.deterministic, mkldnn.conv.fp32_precision),  # type: ignore[attr-defined]
    )
    put_off = _put_off.get()
    return _parts(kind, PART_BYTES) if put_off is None else put_off.parts(kind, PART_BYTES)


class Trials:
    """Kinds of calls that are taken to give the same bits in parts, and are to be tried."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[_Kind, int], None] = {}

    def parts(self, kind: _Kind, part_bytes: int) -> tuple[slice, ...]:
        """What :func:`parts_of` gives if the trial succeeds."""
        parts = _untried_parts(kind, part_bytes)
        if len(parts) > 1:
            self.kinds[kind, part_bytes] = None
        return parts

    def succeed(self) -> bool:
        """Try them, until one does not give the same bits."""
        return all(_parts(*kind) == _untried_parts(*kind) for kind in self.kinds)


_put_off: ContextVar[Trials | None] = ContextVar("put_off", default=None)


@contextmanager
def trials_put_off() -> Iterator[Trials]:
    """Inside, no call is tried."""
    trials = Trials()
    before = _put_off.set(trials)
    try:
        yield trials
    finally:
        _put_off.reset(before)


def convolved(parts: Sequence[slice], images: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``aten.convolution`` with these arguments, part by part."""
    return part_by_part(parts, lambda part: aten.convolution.default(images[part], *rest))


def gradient_of_images(
    parts: Sequence[slice],
    gradient: torch.Tensor,
    like: tuple[torch.Size, torch.dtype, torch.device],
    kernel: torch.Tensor,
    *settings: Any,
) -> torch.Tensor:
    """The first of ``aten.convolution_backward``'s results, part by part, from the images' shape, type and device.

    ``settings`` are that operator's arguments between the kernel and which gradients are wanted.
    """
    shape, dtype, device = like

    def of_part(part: slice) -> torch.Tensor:
        images = untouched((part.stop - part.start, *shape[1:]), dtype, device)
        return aten.convolution_backward.default(gradient[part], images, kernel, *settings, [True, False, False])[0]

    return part_by_part(parts, of_part)


def is_product(images: torch.Tensor, kernel: torch.Tensor, settings: Sequence[Any]) -> bool:
    """Whether a convolution is computed as a product of matrices, without oneDNN and its copies.

    Source: ``use_mkldnn`` in aten/src/ATen/native/Convolution.cpp.
    """
    is_small = len(images) < _LEAST_FOR_ONEDNN and torch.get_num_threads() == 1
    return is_small and _is_pointwise(tuple(images.shape), tuple(kernel.shape), settings)


def _is_pointwise(images: tuple[int, ...], kernel: tuple[int, ...], settings: Sequence[Any]) -> bool:
    stride, padding, dilation, transposed, _, groups = settings
    ones = all(size == 1 for size in (*kernel[2:], *stride, *dilation, groups))
    return len(images) == 4 and ones and not transposed and not any(padding)


@cache
def _parts(kind: _Kind, part_bytes: int) -> tuple[slice, ...]:
    parts = _untried_parts(kind, part_bytes)
    return parts if len(parts) == 1 or _give_the_same_bits(kind, parts) else (slice(0, kind.shapes[0][0]),)


@cache
def _untried_parts(kind: _Kind, part_bytes: int) -> tuple[slice, ...]:
    samples = kind.shapes[0][0]
    images, kernel = (
        torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        for shape, stride, dtype in zip(kind.shapes, kind.strides, kind.dtypes, strict=True)
    )
    result = aten.convolution.default(images, kernel, None, *kind.settings)
    each = (images.nbytes + result.nbytes) // max(1, samples)
    least = -(-max(part_bytes * kind.threads, kernel.nbytes) // max(1, each))
    if kind.threads == 1 and _is_pointwise(kind.shapes[0], kind.shapes[1], kind.settings):
        least = max(least, _LEAST_FOR_ONEDNN)
    return even_parts(samples, max(1, samples // least))


def _give_the_same_bits(kind: _Kind, parts: Sequence[slice]) -> bool:
    """Tried on numbers of its own, forward and backward."""
    generator = torch.Generator().manual_seed(0)

    def numbers(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Those of one sample, scaled for each."""
        one = torch.randn(shape[1:], generator=generator, device="cpu")
        scales = torch.linspace(1, 2, shape[0], device="cpu").view(-1, *(1 for _ in shape[1:]))
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").copy_(one).mul_(scales)

    with torch.no_grad(), without_autocast():
        images, kernel = map(numbers, kind.shapes, kind.strides, kind.dtypes)
        channels = kernel.shape[1] * kind.settings[-1] if kind.settings[3] else kernel.shape[0]
        bias = numbers((channels,), (1,), kind.dtypes[1]) if kind.biased else None
        whole = (slice(0, len(images)),)
        result, ours = (convolved(way, images, kernel, bias, *kind.settings) for way in (whole, parts))
        if not torch.equal(result, ours) or result.stride() != ours.stride():
            return False
        del ours
        like = images.shape, images.dtype, images.device
        del images
        settings = [channels] if kind.biased else None, *kind.settings
        theirs, ours = (gradient_of_images(way, result, like, kernel, *settings) for way in (whole, parts))
        return torch.equal(theirs, ours) and theirs.stride() == ours.stride()

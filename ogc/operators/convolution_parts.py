"""Convolutions, a few images at a time: the bits of PyTorch's kernels, a part of their memory.

oneDNN copies the images to a layout of its own, and what it makes of them back: of a few images at a time these copies
are small, and stay in the caches. On CUDA parts are made where the images' gradient can take the place of the result's.
Which kernel is taken, and in which order it adds up, may depend on how many images there are: so each kind of call is
tried once, whole and in parts, before it is believed.
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

from ..program.program import without_autocast
from ..torch_state.settings import flags, flags_held, without_benchmark
from .gpus import is_for_cuda
from .low_memory import even_parts, holders_when_ours, part_by_part, untouched

aten = torch.ops.aten

PART_BYTES = 2 << 20
"""Images, and what is made of them, that each thread is to be given at a time; no less than of the kernel."""

CUDA_PARTS = 16
"""No more parts than these on CUDA, where each is some kernels."""

_LEAST_FOR_ONEDNN = 16
"""Images from which on one thread leaves a pointwise convolution to it. Source: as for :func:`is_product`."""

_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class _Kind:
    """What two calls must share to be computed alike."""

    device: torch.device  # to try it on
    is_for_cuda: bool
    shapes: tuple[tuple[int, ...], ...]  # of the images and the kernel
    strides: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    biased: bool
    settings: tuple[Any, ...]
    threads: int
    backend: tuple[Any, ...]


def parts_of(images: torch.Tensor, kernel: torch.Tensor, bias: object, *settings: Any) -> tuple[slice, ...]:
    """Chunks of the batch that one after another give the bits of all images at once; one if it is small or they do
    not.

    The first call of a kind takes as long as it does to convolve all images twice, forward and backward. Arguments are
    those of ``aten.convolution``; of the bias the sizes will do.
    """
    given, on_cuda = (images, kernel), is_for_cuda(images)
    is_known = on_cuda or images.device.type in ("cpu", "meta")
    if not is_known or not all(type(t) in _TYPES for t in given):
        return even_parts(len(images), 1)
    backend = torch.backends.cudnn if on_cuda else mkldnn
    kind = _Kind(
        device=images.device if images.is_cuda else torch.device("cpu"),
        is_for_cuda=on_cuda,
        shapes=tuple(tuple(t.shape) for t in given),
        strides=tuple(t.stride() for t in given),
        dtypes=tuple(t.dtype for t in given),
        biased=bias is not None,
        settings=tuple(tuple(s) if isinstance(s, (list, tuple)) else s for s in settings),
        threads=1 if on_cuda else torch.get_num_threads(),
        backend=(backend.enabled, backend.deterministic, backend.conv.fp32_precision),  # type: ignore[attr-defined]
    )
    if on_cuda and not images.is_cuda:  # a GPU that is not there
        return _untried_parts(kind, PART_BYTES)
    put_off = _put_off.get()
    return _parts(kind, PART_BYTES) if put_off is None else put_off.parts(kind, PART_BYTES)


def is_written_over(images: torch.Tensor, kernel: torch.Tensor, bias: object, *settings: Any) -> bool:
    """Whether the gradient of the images, made in parts, takes the place of the result's where nobody else holds
    that.
    """
    if not _keeps_shape(tuple(images.shape), tuple(kernel.shape), settings):
        return False
    return len(parts_of(images, kernel, bias, *settings)) > 1 and bool(holders_when_ours())


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
    over: bool = False,
) -> torch.Tensor:
    """The first of ``aten.convolution_backward``'s results, part by part, from the images' shape, type and device.

    ``settings`` are that operator's arguments between the kernel and the mask. ``over`` puts what is made in parts in
    the place of ``gradient``, which is of the same shape.
    """
    shape, dtype, device = like

    def of_part(part: slice) -> torch.Tensor:
        images = untouched((part.stop - part.start, *shape[1:]), dtype, device)
        return aten.convolution_backward.default(gradient[part], images, kernel, *settings, [True, False, False])[0]

    return part_by_part(parts, of_part, gradient if over else None)


def is_product(images: torch.Tensor, kernel: torch.Tensor, settings: Sequence[Any]) -> bool:
    """Whether it is computed as a product of matrices, without oneDNN. Source: ``use_mkldnn`` in
    aten/src/ATen/native/Convolution.cpp.
    """
    is_small = len(images) < _LEAST_FOR_ONEDNN and torch.get_num_threads() == 1
    return is_small and _is_pointwise(tuple(images.shape), tuple(kernel.shape), settings)


def _keeps_shape(images: tuple[int, ...], kernel: tuple[int, ...], settings: Sequence[Any]) -> bool:
    """Whether the result has the shape of the images."""
    stride, padding, dilation, transposed, *_ = settings
    if transposed or kernel[0] != images[1] or any(step != 1 for step in stride):
        return False
    return all(2 * pad == skip * (size - 1) for pad, skip, size in zip(padding, dilation, kernel[2:], strict=True))


def _is_pointwise(images: tuple[int, ...], kernel: tuple[int, ...], settings: Sequence[Any]) -> bool:
    stride, padding, dilation, transposed, _, groups = settings
    ones = all(size == 1 for size in (*kernel[2:], *stride, *dilation, groups))
    return len(images) == 4 and ones and not transposed and not any(padding)


@cache
def _parts(kind: _Kind, part_bytes: int) -> tuple[slice, ...]:
    parts = _untried_parts(kind, part_bytes)
    give_the_same_bits = _give_the_same_bits_on_cuda if kind.is_for_cuda else _give_the_same_bits
    return parts if len(parts) == 1 or give_the_same_bits(kind, parts) else even_parts(kind.shapes[0][0], 1)


@cache
def _untried_parts(kind: _Kind, part_bytes: int) -> tuple[slice, ...]:
    samples = kind.shapes[0][0]
    if kind.is_for_cuda and not _keeps_shape(kind.shapes[0], kind.shapes[1], kind.settings):
        return even_parts(samples, 1)
    images, kernel = (
        torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        for shape, stride, dtype in zip(kind.shapes, kind.strides, kind.dtypes, strict=True)
    )
    result = aten.convolution.default(images, kernel, None, *kind.settings)
    each = (images.nbytes + result.nbytes) // max(1, samples)
    least = -(-max(part_bytes * kind.threads, kernel.nbytes) // max(1, each))
    if kind.is_for_cuda:
        least = max(least, -(-samples // CUDA_PARTS))
    elif kind.threads == 1 and _is_pointwise(kind.shapes[0], kind.shapes[1], kind.settings):
        least = max(least, _LEAST_FOR_ONEDNN)
    return even_parts(samples, max(1, samples // least))


def _give_the_same_bits(kind: _Kind, parts: Sequence[slice]) -> bool:
    """Tried on numbers of its own, forward and backward."""
    with torch.no_grad(), without_autocast():
        images, kernel, bias = _operands(kind)
        whole = even_parts(len(images), 1)
        result, ours = (convolved(way, images, kernel, bias, *kind.settings) for way in (whole, parts))
        if not torch.equal(result, ours) or result.stride() != ours.stride():
            return False
        del ours
        like = images.shape, images.dtype, images.device
        del images
        settings = None if bias is None else list(bias.shape), *kind.settings
        theirs, ours = (gradient_of_images(way, result, like, kernel, *settings) for way in (whole, parts))
        return torch.equal(theirs, ours) and theirs.stride() == ours.stride()


def _give_the_same_bits_on_cuda(kind: _Kind, parts: Sequence[slice]) -> bool:
    """Tried on numbers of its own, all gradients at once and one after another; not where there is no room for that."""
    try:
        with torch.no_grad(), without_autocast(), flags_held(without_benchmark(flags())):
            images, kernel, bias = _operands(kind)
            gradient = images.flip(0)
            settings = None if bias is None else list(bias.shape), *kind.settings
            given, of_weights = (gradient, images, kernel, *settings), (True, bias is not None)
            whole = aten.convolution_backward.default(*given, [True, *of_weights])
            weights = aten.convolution_backward.default(*given, [False, *of_weights])[1:]
            like = images.shape, images.dtype, images.device
            ours = gradient_of_images(parts, gradient, like, kernel, *settings, over=True), *weights
            return all(theirs is None or torch.equal(theirs, mine) for theirs, mine in zip(whole, ours, strict=True))
    except torch.cuda.OutOfMemoryError:
        return False


def _operands(kind: _Kind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Images, kernel and bias of numbers."""
    generator = torch.Generator().manual_seed(0)

    def numbers(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Those of one sample, scaled for each."""
        one = torch.randn(shape[1:], generator=generator, device="cpu").to(kind.device)
        scales = torch.linspace(1, 2, shape[0], device="cpu").view(-1, *(1 for _ in shape[1:])).to(kind.device)
        return torch.empty_strided(shape, stride, dtype=dtype, device=kind.device).copy_(one).mul_(scales)

    images, kernel = map(numbers, kind.shapes, kind.strides, kind.dtypes)
    channels = kernel.shape[1] * kind.settings[-1] if kind.settings[3] else kernel.shape[0]
    return images, kernel, numbers((channels,), (1,), kind.dtypes[1]) if kind.biased else None

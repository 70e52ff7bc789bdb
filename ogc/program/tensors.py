"""Tensors' memory: storages, layouts, copies for runs on the side.

PyTorch keeps the Python object of a storage for as long as the storage lives (since 2.1, c10/core/impl/PyObjectSlot.h):
it is the same object each time, and weak references to it end when the memory is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..torch_state.private import inner_tensors, storage_id, untraced
from .program import storage_of

T = TypeVar("T")

ByStorage = WeakKeyDictionary[torch.UntypedStorage, T]
"""A table of storages that live."""


class LiveBytes:
    """How many bytes some storages have, of those that live."""

    def __init__(self) -> None:
        self.bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._gone, key, size))
            self.bytes += size

    def __iter__(self) -> Iterator[torch.UntypedStorage]:
        return (storage for one in self._alive.values() if (storage := one()) is not None)

    def _gone(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self.bytes -= size


# -- layouts ---------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """The shape of a tensor and its strides in entries."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(tuple(tensor.shape), tensor.stride())

    @staticmethod
    def usual(tensor: torch.Tensor) -> Layout:
        """That of a gradient for a tensor unless there is a reason for another one: its own, without gaps."""
        return Layout.of(tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta"))

    def zeros(self, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        if device == "meta":
            return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
        entries = torch.zeros(self.span, dtype=dtype, device=device)
        return entries.as_strided(self.shape, self.strides)

    def is_like(self, other: Layout) -> bool:
        """Whether a tensor of the same shape lies in memory as one of the other layout does."""
        axes = zip(self.shape, self.strides, other.strides, strict=True)
        return all(size == 1 or mine == theirs for size, mine, theirs in axes)

    @property
    def is_dense(self) -> bool:
        """Whether it covers a block of memory without gaps or overlaps."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Entries of memory from the first to the last one, with the gaps between them."""
        axes = zip(self.shape, self.strides, strict=True)
        return 0 if 0 in self.shape else 1 + sum((size - 1) * stride for size, stride in axes)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers a block of memory without gaps or overlaps."""
    return Layout.of(tensor).is_dense


# -- tensors of classes with operators of their own ------------------------------------------------------


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a tensor that a call made holds, by attribute, if it is of such a class; parameters stay what they are."""
    return {} if isinstance(tensor, torch.nn.Parameter) else inner_tensors(tensor)


def is_content(part: torch.Tensor) -> bool:
    """Whether a part is numbers, full or quantized, and no lengths or indices."""
    return bool(part.numel()) and (part.is_floating_point() or part.is_complex() or part.dtype in _QUANTIZED)


_QUANTIZED = (torch.int8, torch.uint8)


def contents(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with the numbers of one, all the way down: itself, if it is of no such class."""
    parts = parts_of(tensor)
    return [inner for part in parts.values() if is_content(part) for inner in contents(part)] if parts else [tensor]


# -- copies ----------------------------------------------------------------------------------------------


class Start(torch.autograd.Function):
    """Makes tensors differentiable, as what operators made is: they may be written, and no graph holds them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        return (None, *(None for _ in gradients))


anchor = torch.empty(0, requires_grad=True)
"""What a ``Start`` takes first."""


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of their own for a run on the side, of the same strides; those that share memory share it again.

    Autograd's graph starts at them. Leaves are leaves again; others are results of a ``Start`` each, which has the
    number of the input.
    """
    tensors = list(tensors)
    found = []
    for number, (copy, tensor) in enumerate(zip(map(torch.Tensor.detach, made_copies(tensors)), tensors, strict=True)):
        if tensor.is_leaf or not tensor.requires_grad:
            found.append(copy.requires_grad_(tensor.requires_grad))
            continue
        with torch.enable_grad():
            found += Start.apply(anchor, copy)
        node: Any = found[-1].grad_fn
        node.number_of_input = number
    return found


def input_started(node: Any) -> int | None:
    """The number of the input that starts at a node of autograd's graph, if that is one of ``copies``."""
    return getattr(node, "number_of_input", None)


def made_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those copies as results of operators, not leaves of autograd, where tensors require grad."""
    copied: dict[int, torch.Tensor] = {}
    with torch.enable_grad():
        for group in _sharing(tensors):
            one, requires_grad = tensors[group[0]].detach(), any(tensors[n].requires_grad for n in group)
            has_gaps = one.layout is torch.strided and one.numel() > 0 and not is_dense(one)
            if len(group) == 1 and not has_gaps:
                copied[group[0]] = one.requires_grad_(requires_grad).clone()
                continue
            first = min(tensors[n].storage_offset() for n in group)
            span = max(_end(tensors[n]) for n in group) - first
            block = one.as_strided((span,), (1,), first).requires_grad_(requires_grad).clone()
            for n in group:
                t = tensors[n]
                part = block.as_strided(t.shape, t.stride(), t.storage_offset() - first)
                copied[n] = part if t.requires_grad else part.detach()
    return [copied[n] for n in range(len(tensors))]


def _sharing(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of tensors in groups, of which those in one lie in the same region of a storage."""
    groups: list[list[int]] = []
    by_storage: dict[Any, list[int]] = {}
    for n, t in enumerate(tensors):
        if t.layout is torch.strided and t.numel() and storage_of(t) is not None:
            by_storage.setdefault((storage_id(t), t.dtype, t.is_conj(), t.is_neg()), []).append(n)
        else:
            groups.append([n])
    for numbers in by_storage.values():
        end = -1
        for n in sorted(numbers, key=lambda n: tensors[n].storage_offset()):
            if tensors[n].storage_offset() >= end:
                groups.append([])
            groups[-1].append(n)
            end = max(end, _end(tensors[n]))
    return groups


def _end(tensor: torch.Tensor) -> int:
    """The entry of its storage after its last one."""
    return int(tensor.storage_offset()) + Layout.of(tensor).span

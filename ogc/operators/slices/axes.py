"""Which operators treat what lies along an axis one by one, and along which axis of their results that lies then.

Said by rules: functions of the arguments of a call, and of the axes along which the tensors among these are in parts.
They look at shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...program.program import tensor_leaves

Axes = tuple[int | None, ...]
"""For each tensor among the arguments of a call, in order: the axis along which it is in parts; None: it is whole."""


@dataclass(frozen=True)
class Along:
    """A call in parts: the axis of its results, and the axes of all that it is given, of which some were not known."""

    result: int
    given: Axes


Rule = Callable[[Sequence[Any], Axes], Along | None]
"""What a call in parts is; None where it must see the whole."""


def of_first(axis_of_result: Callable[[Sequence[Any], int], int | None]) -> Rule:
    """The rule of an operator whose first tensor may be in parts, and whose others are parameters to it."""

    def rule(args: Sequence[Any], axes: Axes) -> Along | None:
        first, *others = axes
        if first is None or any(axis is not None for axis in others):
            return None
        result = axis_of_result(args, first)
        return None if result is None else Along(result, axes)

    return rule


def images(args: Sequence[Any], axis: int) -> int | None:
    """Of what works on each image of a batch, with its channels."""
    return 0 if axis == 0 and args[0].dim() == 4 else None


def before_last(args: Sequence[Any], axis: int, count: int = 1) -> int | None:
    """Of what works on entries along the last axes, so many of them."""
    return axis if axis < args[0].dim() - count else None


def over(dims_at: int, keeps: int | bool) -> Rule:
    """The rule of what reduces or normalizes some dimensions.

    Args:
        dims_at: the argument that names them, a number or a list.
        keeps: the argument that says whether they stay, as ones, or whether they do.
    """

    def axis_of_result(args: Sequence[Any], axis: int) -> int | None:
        dims = args[dims_at] if len(args) > dims_at else None
        if dims is None or dims == []:
            return None
        rank = args[0].dim()
        reduced = {dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
        stay = keeps if isinstance(keeps, bool) else len(args) > keeps and bool(args[keeps])
        return None if axis in reduced else axis if stay else axis - sum(dim < axis for dim in reduced)

    return of_first(axis_of_result)


def moved(operator: Callable[..., Any]) -> Rule:
    """The rule of an operator that gives entries of its tensor in other places: a view, or a copy of one.

    Of an axis so many entries of a contiguous tensor follow one another in memory. Where an axis of the result
    has as many, in as many parts or in a multiple of it, the parts lie along that.
    """

    def axis_of_result(args: Sequence[Any], axis: int) -> int | None:
        given = torch.empty(args[0].shape, device="meta")
        if axis >= given.dim():
            return None
        found = operator(given, *args[1:])
        result = found if isinstance(found, torch.Tensor) else found[0]
        size, extent = given.shape[axis], given.shape[axis] * given.stride(axis)
        if size < 2:
            return None
        alike = (n for n in range(result.dim()) if result.shape[n] * result.stride(n) == extent)
        return next((n for n in alike if result.shape[n] % size == 0), None)

    return of_first(axis_of_result)


def elementwise(args: Sequence[Any], axes: Axes) -> Along | None:
    """The rule of operators that work entry by entry, with broadcasting."""
    return _broadcast(args, axes, 0)


def batched_products(args: Sequence[Any], axes: Axes) -> Along | None:
    """The rule of products of matrices, and of attention, in a batch of them."""
    return _broadcast(args, axes, 2)


def rows_of_products(args: Sequence[Any], axes: Axes) -> Along | None:
    """The rule of ``matmul``: in a batch of matrices, or of rows that a matrix is multiplied with."""
    first, second = args[:2]
    if axes[0] is not None and axes[1] is None and second.dim() == 2 and axes[0] < first.dim() - 1:
        return Along(axes[0], axes)
    return batched_products(args, axes) if first.dim() > 2 and second.dim() > 2 else None


def added_to_products(args: Sequence[Any], axes: Axes) -> Along | None:
    """The rule of ``addmm``: of rows that a matrix is multiplied with, where something is added that all have alike."""
    added, first = args[:2]
    return Along(0, axes) if axes == (None, 0, None) and added.dim() == 1 and first.dim() == 2 else None


def joined(args: Sequence[Any], axes: Axes) -> Along | None:
    """The rule of concatenations."""
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    axis = next(axis for axis in axes if axis is not None)
    alike = all(one in (None, axis) for one in axes) and len({t.dim() for t in tensors}) == 1
    return Along(axis, (axis,) * len(axes)) if alike and dim % tensors[0].dim() != axis else None


def _broadcast(args: Sequence[Any], axes: Axes, whole: int) -> Along | None:
    """Where shapes are broadcast against one another, but for so many last dimensions; axes count from the last one."""
    tensors = tensor_leaves(args)
    places = {t.dim() - axis for t, axis in zip(tensors, axes, strict=True) if axis is not None}
    if len(places) != 1 or min(places) <= whole:
        return None
    (place,) = places
    found = tuple(t.dim() - place if t.dim() >= place and t.shape[-place] != 1 else None for t in tensors)
    if any(axis is not None and new != axis for axis, new in zip(axes, found, strict=True)):
        return None
    sizes = {t.shape[axis] for t, axis in zip(tensors, found, strict=True) if axis is not None}
    return Along(max(t.dim() for t in tensors) - place, found) if len(sizes) == 1 else None

"""What rewrites know of operators, such as which treat what lies along an axis one by one.

Axes are told by functions of a call's arguments, and of the axes along which the tensors among these are in parts. They
look at shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..operators.convolution import hidden_bytes, hidden_bytes_of_backward
from ..operators.elementwise import RESHAPING
from ..operators.low_memory import plain_operator
from ..operators.registry import is_elementwise, registered
from ..program.program import tensor_leaves

aten = torch.ops.aten

Axes = tuple[int | None, ...]
"""For each tensor among the arguments of a call, in order: the axis along which it is in parts; None: it is whole."""


@dataclass(frozen=True)
class Along:
    """A call in parts: the axis of its results, and the axes of all that it is given, of which some were not known."""

    result: int
    given: Axes


AxisRule = Callable[[Sequence[Any], Axes], Along | None]
"""What a call in parts is; None where it must see the whole."""


@dataclass(frozen=True)
class Summed:
    """How a call of a loss is made of a sum over rows.

    Attributes:
        args: of a call that gives the sum.
        targets: the argument that has one entry, or row, for each row of the first one.
        classes: the argument that holds weights of classes, if any.
        ignored: the target that does not count.
        is_mean: the call gives the mean.
    """

    args: tuple[Any, ...]
    targets: Any
    classes: Any
    ignored: int
    is_mean: bool


@dataclass(frozen=True)
class Rule:
    """What rewrites know of an operator.

    Attributes:
        along: how it may be called on parts of what it is given.
        sizes: the argument that lists the sizes of its result.
        dims: the argument that names the dimensions that it works over.
        layer: of a linear layer, from a call's arguments: rows, weight, bias, and whether the weight has a column
            for each of its outputs, not a row.
        is_heavy: its backward does not need its result, and its time makes a slice of a batch worthwhile.
        summed: of a loss that adds up what it gives for rows: how, from a call's arguments.
        hidden_bytes: what its kernels on a CPU, in parts, allocate at once beyond the results.
        runs_uncompiled: compiled, it takes more memory.
    """

    along: AxisRule | None = None
    sizes: int | None = None
    dims: int | None = None
    layer: Callable[[Sequence[Any]], tuple[Any, Any, Any, bool] | None] = lambda args: None
    is_heavy: bool = False
    summed: Callable[[Sequence[Any]], Summed | None] = lambda args: None
    hidden_bytes: Callable[[Sequence[Any], list[torch.Tensor]], int] = lambda args, results: 0
    runs_uncompiled: bool = False


def of_first(axis_of_result: Callable[[Sequence[Any], int], int | None]) -> AxisRule:
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


def over(dims_at: int, keeps: int | bool) -> AxisRule:
    """The rule of what reduces or normalizes the dimensions that an argument names; ``keeps`` them, or the argument
    says so.
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


def moved(operator: Callable[..., Any]) -> AxisRule:
    """The rule of an operator that gives entries of its tensor in other places: a view, or a copy of one.

    An axis stands for so many entries that follow one another in memory. The parts lie along the axis of the result
    that stands for as many, if its size is a multiple.
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


def dropped(args: Sequence[Any], axes: Axes) -> Along | None:
    """The rule of dropout, which draws its mask for the whole, unless it drops nothing."""
    _, share, is_training = args
    return None if is_training and share else elementwise(args, axes)


_MEAN, _SUM = 1, 2
"""How aten numbers reductions."""


def _over_classes(args: Sequence[Any]) -> Summed | None:
    """Of scores, targets, and what follows with its default: weights of classes, reduction, target to ignore."""
    given: tuple[Any, ...] = (*args, *(None, _MEAN, -100)[len(args) - 2 :])
    scores, targets, classes, reduction, ignored, *rest = given
    if reduction not in (_MEAN, _SUM):
        return None
    return Summed((scores, targets, classes, _SUM, ignored, *rest), targets, classes, ignored, reduction == _MEAN)


_rows = of_first(lambda args, axis: before_last(args, axis, len(args[1])))
_product = Rule(rows_of_products, is_heavy=True, layer=lambda args: (*args, None, True))

RULES: dict[Any, Rule] = {
    **{one.target: Rule(moved(one.target)) for one in registered() if one.moves},
    **{one: Rule(moved(one), sizes=1) for one in RESHAPING},
    **{
        getattr(one, name): Rule(of_first(lambda args, axis: axis))
        for one in (aten.to, aten._to_copy)
        for name in one.overloads()
    },
    **dict.fromkeys(
        (aten.relu.default, aten.relu_.default, aten.sigmoid.default, aten.tanh.default), Rule(elementwise)
    ),
    **dict.fromkeys((aten.silu.default, aten.silu_.default, aten.gelu.default, aten.elu.default), Rule(elementwise)),
    **dict.fromkeys((aten.leaky_relu.default, aten.leaky_relu_.default, aten.softplus.default), Rule(elementwise)),
    **dict.fromkeys((aten.hardtanh.default, aten.hardtanh_.default, aten.hardsigmoid.default), Rule(elementwise)),
    **dict.fromkeys((aten.hardswish.default, aten.hardswish_.default, aten.log_sigmoid.default), Rule(elementwise)),
    aten.dropout.default: Rule(dropped),
    aten.cat.default: Rule(joined),
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), Rule(_rows)),
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int), Rule(over(1, True), dims=1)),
    **dict.fromkeys((aten.mean.dim, aten.sum.dim_IntList), Rule(over(1, 2), dims=1)),
    **dict.fromkeys((aten.max_pool2d.default, aten.avg_pool2d.default), Rule(of_first(images))),
    aten.adaptive_avg_pool2d.default: Rule(of_first(images)),
    aten.convolution.default: Rule(
        of_first(lambda args, axis: 0 if axis == 0 and args[0].dim() == args[1].dim() else None),
        is_heavy=True,
        hidden_bytes=hidden_bytes,
        runs_uncompiled=True,  # torch.compile copies its weights on a CPU
    ),
    aten.convolution_backward.default: Rule(hidden_bytes=hidden_bytes_of_backward),
    aten.linear.default: Rule(
        of_first(before_last),
        is_heavy=True,
        layer=lambda args: (args[0], args[1], args[2] if len(args) > 2 else None, False),
    ),
    **dict.fromkeys((aten.matmul.default, aten.mm.default), _product),
    aten.bmm.default: Rule(batched_products, is_heavy=True),
    aten.addmm.default: Rule(
        added_to_products,
        is_heavy=True,
        layer=lambda args: (args[1], args[2], args[0], True) if len(args) == 3 else None,
    ),
    aten.scaled_dot_product_attention.default: Rule(batched_products),
    **dict.fromkeys((aten.cross_entropy_loss.default, aten.nll_loss_nd.default), Rule(summed=_over_classes)),
    aten.nll_loss.default: Rule(summed=_over_classes),
}
_ORDINARY = Rule()


def rule_of(target: Any) -> Rule:
    """What is known of an operator, or of the one that a low-memory variant stands for."""
    return RULES.get(plain_operator(target), _ORDINARY)


def along(target: Any, args: Sequence[Any], axes: Axes) -> Along | None:
    """What a call in parts is, of which these axes are known; None where it must see the whole."""
    rule = rule_of(target).along or (elementwise if is_elementwise(target) else None)
    return rule and rule(args, axes)

"""What the operators of a TorchScript graph do as calls of Python: on tensors, and on numbers that a trace calls so."""

from __future__ import annotations

import math
import operator as python
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ...program.program import operator_name, tensor_leaves
from ...torch_state.dispatch import unseen
from ...torch_state.private import OpOverload, schema_of

CASTS: dict[str, Callable[[Any], Any]] = {
    "aten::Int": lambda given: given.item() if isinstance(given, torch.Tensor) else int(given),
    "aten::Float": lambda given: given.item() if isinstance(given, torch.Tensor) else float(given),
    "aten::Bool": lambda given: given.item() if isinstance(given, torch.Tensor) else bool(given),
    **dict.fromkeys(
        ("aten::ScalarImplicit", "aten::IntImplicit", "aten::FloatImplicit", "aten::item"),
        lambda given: given.item() if isinstance(given, torch.Tensor) else given,
    ),
}
"""By which a trace makes numbers of tensors."""

_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, alpha=1: a + b * alpha,
    "sub": lambda a, b, alpha=1: a - b * alpha,
    "rsub": lambda a, b, alpha=1: b - a * alpha,
    "mul": python.mul,
    "div": lambda a, b, rounding_mode=None: {"floor": a // b, "trunc": math.trunc(a / b)}.get(rounding_mode, a / b),
    "floor_divide": python.floordiv,
    "remainder": python.mod,
    "pow": python.pow,
    "neg": python.neg,
    "abs": abs,
    "to": lambda a, *rest: a,
    "detach": lambda a: a,
    **{name: getattr(python, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(math, name) for name in ("sqrt", "floor", "ceil", "exp", "log")},
}
"""Operators on what is a tensor in a trace and a number of Python in eager."""

_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32,
    torch.bfloat16,
)  # fmt: skip
_NAMED = {
    "ScalarType": _DTYPES,
    "MemoryFormat": (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d),
    "Layout": (torch.strided,),
}
"""What the numbers of TorchScript stand for. Source: c10/core/ScalarType.h, MemoryFormat.h, Layout.h."""


def as_number(value: Any) -> Any:
    """What a trace has made a constant tensor of, if it may be a number of Python."""
    is_number = isinstance(value, torch.Tensor) and not value.dim() and value.dtype in _NUMBERS
    return value.item() if is_number and value.device.type == "cpu" else value


_NUMBERS = (torch.int64, torch.float64, torch.complex128, torch.bool)


def arguments_of(operator: OpOverload, given: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in a graph, by position and by name, with Python's names of types and layouts."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument, value in zip(schema_of(operator).arguments, given, strict=True):
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        if kind in _NAMED and isinstance(value, int) and value < len(_NAMED[kind]):
            value = _NAMED[kind][value]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def item_of(given: Any, number: int) -> Any:
    """One of several results."""
    return given[number]


def fresh(tensor: torch.Tensor) -> Any:
    """A tensor that each forward makes anew of Python's data."""
    with unseen():
        copied = tensor.clone()
    return torch.ops.aten.lift_fresh.default(copied)


class Operate:
    """A call of an operator; ``is_without_grad`` if a trace says that its result does not require grad."""

    def __init__(self, operator: OpOverload, is_without_grad: bool) -> None:
        self.operator = operator
        self.is_without_grad = is_without_grad
        self.wants_tensors = [str(argument.type) == "Tensor" for argument in schema_of(operator).arguments]
        self.__name__ = operator_name(operator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = tensor_leaves(args, kwargs)
        if self.operator is torch.ops.aten.contiguous.default and args[0].is_contiguous(**kwargs):
            return args[0]  # which Python does not call, but traces
        if not tensors and any(self.wants_tensors):
            if self.__name__ in _ON_NUMBERS:
                return _ON_NUMBERS[self.__name__](*args, **kwargs)
            with unseen():
                made = [torch.tensor(one) if is_one else one for one, is_one in zip(args, self.wants_tensors)]
                return self.operator(*made, **kwargs).item()
        is_off = self.is_without_grad and any(tensor.requires_grad for tensor in tensors)
        with torch.no_grad() if is_off and self._would_require_grad(args, kwargs) else nullcontext():
            return self.operator(*args, **kwargs)

    def _would_require_grad(self, args: Any, kwargs: Any) -> bool:
        def on_meta(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return torch.device("meta") if isinstance(leaf, torch.device) else leaf
            needs = leaf.requires_grad and not schema_of(self.operator).is_mutable
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta", requires_grad=needs)

        with unseen():
            try:
                given = torch.fx.node.map_aggregate((args, kwargs), on_meta)
                result = self.operator(*given[0], **given[1])
            except (NotImplementedError, RuntimeError):  # it needs content
                return True
        return any(tensor.requires_grad for tensor in tensor_leaves(result))

"""What the operators of a TorchScript graph do as calls of Python: on tensors, and on numbers that a trace calls so."""

from __future__ import annotations

import math
import operator as python
from collections.abc import Callable, Collection
from typing import Any

import torch

from ...program.program import tensor_leaves
from ...torch_state.dispatch import unseen
from ...torch_state.private import OpOverload, schema_of

CASTS: dict[str, Callable[[Any], Any]] = {
    "Int": lambda given: given.item() if isinstance(given, torch.Tensor) else int(given),
    "Float": lambda given: given.item() if isinstance(given, torch.Tensor) else float(given),
    "Bool": lambda given: bool(given),
    **dict.fromkeys(
        ("ScalarImplicit", "IntImplicit", "FloatImplicit", "item"),
        lambda given: given.item() if isinstance(given, torch.Tensor) else given,
    ),
}
"""By which a trace makes numbers of tensors."""


ON_OBJECTS: dict[str, Callable[..., Any]] = {
    "append": lambda a, b: a.append(b) or a,
    "dim": torch.Tensor.dim,
    "format": str.format,
    "len": len,
    "list": list,
    "numel": torch.Tensor.numel,
    "size": lambda a, *dim: a.size(*dim) if dim else list(a.shape),
    "__contains__": python.contains,
    "__getitem__": python.getitem,
    "__is__": python.is_,
    "__isnot__": python.is_not,
    "__not__": python.not_,
}
"""Operators on lists and other objects, and on tensors those that ask for sizes."""


def _divided(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    return {"floor": lambda: a // b, "trunc": lambda: math.trunc(a / b), None: lambda: a / b}[rounding_mode]()


ON_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, alpha=1: a + b * alpha if alpha != 1 else a + b,
    "sub": lambda a, b, alpha=1: a - b * alpha,
    "rsub": lambda a, b, alpha=1: b - a * alpha,
    "div": _divided,
    "reciprocal": lambda a: 1 / a,
    "to": lambda a, *_: a,
    "detach": lambda a: a,
    "__and__": python.and_,
    "__or__": python.or_,
    "floor_divide": python.floordiv,
    "floordiv": python.floordiv,
    "remainder": python.mod,
    "abs": abs,
    **{name: getattr(python, name) for name in ("eq", "ge", "gt", "le", "lt", "mul", "ne", "neg", "pow")},
    **{name: getattr(math, name) for name in ("ceil", "exp", "floor", "log", "sqrt")},
}
"""Operators on what is no tensor: a trace makes tensors of numbers that are Python's in eager."""

_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32,
    torch.bfloat16,
)  # fmt: skip
_NAMED: dict[str, tuple[Any, ...]] = {
    "ScalarType": _DTYPES,
    "MemoryFormat": (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d),
    "Layout": (torch.strided,),
}
"""What the numbers of TorchScript stand for. Source: c10/core/ScalarType.h, MemoryFormat.h, Layout.h."""


def as_number(value: torch.Tensor, held: Collection[int]) -> Any:
    """What a trace has made a constant tensor of, if it may be a number of Python; ``held`` are tensors' addresses."""
    is_number = not value.dim() and value.dtype in _NUMBERS and value.device.type == "cpu"
    return value.item() if is_number and value.data_ptr() not in held else value


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


def format_of(number: int) -> torch.memory_format:
    """The memory format that a number of TorchScript stands for."""
    found: torch.memory_format = _NAMED["MemoryFormat"][number]
    return found


def fresh(tensor: torch.Tensor) -> Any:
    """A tensor that each forward makes anew of Python's data."""
    with unseen():
        copied = tensor.clone()
    return torch.ops.aten.lift_fresh.default(copied)


def would_require_grad(operator: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether results of a call require grad where gradients are on, of one that writes nothing."""
    if schema_of(operator).is_mutable or not any(tensor.requires_grad for tensor in tensor_leaves(args, kwargs)):
        return False

    def on_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            kind, needs = leaf.dtype, leaf.requires_grad
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=kind, device="meta", requires_grad=needs)
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    with unseen():
        try:
            given = torch.fx.node.map_aggregate((args, kwargs), on_meta)
            result = operator(*given[0], **given[1])
        except (NotImplementedError, RuntimeError):  # it needs content
            return True
    return any(tensor.requires_grad for tensor in tensor_leaves(result))

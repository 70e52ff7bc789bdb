"""The registry of operators: all that is special about one is said once, in the file of its family.

What is not registered is as most operators are: nothing about it is special but what was seen when it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from ..program.opaque import Opaque
from ..program.program import WithoutGrad
from ..torch_state.private import OpOverload, overload_name, schema_of
from .low_memory import LowMemory, plain_operator
from .weights import Use, Weights

Arguments = Sequence[Any]


@dataclass(frozen=True)
class Operator:
    """What is special about an operator of PyTorch.

    Attributes:
        target: its overload.
        low_memory: a variant of it with the same bits, whose backward needs less memory.
        live: positions of running statistics that it updates and that its own result does not depend on, and of the
            argument that says whether it does. Recomputed on others, it gives the same result.
        weigh: the weights of a use, with what its kernels on a CPU allocate underneath the dispatcher.
        on_meta: its results for meta tensors, sooner than by PyTorch's decompositions.
        needs_data: whether shapes depend on data, from the tensors among its arguments.
        to_run_with: where shapes do not tell the bytes of its kernels on a CPU, so that it is run for them: gradients
            of its first results to run it backward with.
        moves: it gives entries of its first argument in other places.
        chooses_by_mask: it does not convert its mask to the type that it computes in.
        copies_strided_gradients: its backward first makes a gradient contiguous.
        returns_view: its result is its own, and dense, and a view all the same.
        begins_graph: autograd's graph begins with its result, and holds that and its gradient.
        unfolded: what a call, by its arguments, may be made of instead; see :mod:`ogc.parser.passes.calls`.
    """

    target: Any
    low_memory: LowMemory | None = None
    live: tuple[tuple[int, ...], int] | None = None
    weigh: Callable[[Use], Weights] = lambda use: use.weights
    on_meta: Callable[..., Any] | None = None
    needs_data: Callable[[list[torch.Tensor]], bool] = lambda tensors: False
    to_run_with: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
    moves: bool = False
    chooses_by_mask: bool = False
    copies_strided_gradients: bool = False
    returns_view: bool = False
    begins_graph: bool = False
    unfolded: Callable[[Arguments, dict[str, Any]], Callable[..., Any] | None] | None = None

    @property
    def has_rule(self) -> bool:
        """Whether there is a rule for what its kernels on a CPU allocate."""
        return self.weigh is not _ORDINARY.weigh


_ORDINARY = Operator(None)
_registered: dict[Any, Operator] = {}


def register(*operators: Operator) -> None:
    """Say what is special about operators; raises InputError where that has been said of one of them."""
    for operator in operators:
        if operator.target in _registered:
            raise InputError(f"{operator.target} is registered already; say all that is special about it at once")
        _registered[operator.target] = operator


def unregister(target: Any) -> None:
    """Take back what was said of an operator."""
    del _registered[target]


def registered() -> tuple[Operator, ...]:
    """All operators about which anything is special."""
    return tuple(_registered.values())


def of(target: Any) -> Operator:
    """What is special about an operator, or about the one that a low-memory variant stands for."""
    return _registered.get(plain_operator(target), _ORDINARY)


def low_memory_variant(target: Any, device: torch.device) -> LowMemory | None:
    """The drop-in for an operator on a device, if there is one."""
    variant = None if isinstance(target, LowMemory) else of(target).low_memory
    return variant if variant is not None and variant.is_for(device) else None


def updates_statistics(target: Any) -> bool:
    """Whether an operator may update arguments that its own result does not depend on."""
    return bool(target.live if isinstance(target, Opaque) else _kernel(target).live)


def said_to_be_written(target: Any, args: Arguments) -> list[torch.Tensor]:
    """The tensors that a call writes by its schema: not all kernels count that."""
    schema = schema_of(target)
    if schema is None or not schema.is_mutable:
        return []
    pairs = zip(schema.arguments, args, strict=False)
    return [t for a, t in pairs if a.alias_info and a.alias_info.is_write and isinstance(t, torch.Tensor)]


def live_arguments(target: Any, args: Arguments) -> list[Any]:
    """The arguments that a call updates and its own result does not depend on, as far as they are given."""
    if isinstance(target, Opaque):
        return [args[p] for p in target.live]
    positions, condition = _kernel(target).live or ((), 0)
    is_live = condition < len(args) and args[condition] is True
    return [args[p] for p in positions if p < len(args)] if is_live else []


def _kernel(target: Any) -> Operator:
    return of(target.operator if isinstance(target, WithoutGrad) else target)


def copies_strided_gradients(target: Any) -> bool:
    """Whether the operator's backward kernel makes a gradient contiguous before it reads it."""
    own = target.copies_strided_gradients if isinstance(target, LowMemory) else None
    return of(target).copies_strided_gradients if own is None else own


_ELEMENTWISE = {torch.ops.aten.hardswish.default, torch.ops.aten.leaky_relu.default}
"""Operators that work entry by entry, though some releases do not say so."""


def is_elementwise(target: Any) -> bool:
    """Whether the result is laid out as what it is computed from; a cumulative sum, for one, is not."""
    plain = plain_operator(target)
    return torch.Tag.pointwise in getattr(plain, "tags", ()) or plain in _ELEMENTWISE


def out_of_place(target: Any) -> Any:
    """The operator without its underscore; None if it has none, or no such functional."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name, overload = schema_of(target).name.split("::")[1], overload_name(target)
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or overload not in packet.overloads():
        return None
    functional = getattr(packet, overload)
    kinds = [[str(argument.type) for argument in schema_of(one).arguments] for one in (functional, target)]
    if kinds[0] != kinds[1]:  # pow_(Tensor, Scalar) and pow(Scalar, Tensor) are both called Scalar
        return None
    return functional


def ones_like(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of all results, laid out as these are."""
    return [torch.ones_like(result) for result in results]


def run_for_bytes(*targets: Any) -> tuple[Operator, ...]:
    """Operators of which nothing is special but that shapes do not tell what a CPU takes; see ``to_run_with``."""
    return tuple(Operator(target, to_run_with=ones_like) for target in targets)


def like(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """What ``empty_like`` gives, sooner; the result of many operators for meta tensors."""
    return tensor.new_empty(tensor.shape) if tensor.is_contiguous() else torch.empty_like(tensor)

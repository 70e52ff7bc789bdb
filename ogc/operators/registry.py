"""The registry of operators: all that is special about one is said once, in the room of its family.

What is not registered is as most operators are: nothing about it is special but what was seen when it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from ..program.program import WithoutGrad
from ..torch_state.private import OpOverload, overload_name, schema_of
from .cuda.gpus import CudaKernel, Gpu
from .low_memory import LowMemory, plain_operator
from .slices.axes import Along, Axes, Rule, elementwise
from .slices.compiled import Compiled
from .weights import Use, Weights

Arguments = Sequence[Any]


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
class Operator:
    """What is special about an operator of PyTorch.

    Attributes:
        target: its overload.
        low_memory: a form of it with the same bits, whose backward needs less memory.
        live_arguments: positions of running statistics that it updates and that its own result does not depend on, if
            its argument ``live_if`` is true. Run again on others, it gives the same result and changes nothing.
        along: the rule by which it may be called on parts of what it is given; see :mod:`ogc.operators.slices.axes`.
        moves: it gives entries of its first argument in other places.
        sizes: the argument that lists the sizes of its result.
        dims: the argument that names the dimensions that it works over.
        layer: of a linear layer, from the arguments of a call: rows, weight, bias, and whether the weight has a column
            for each of its outputs, not a row; None if it is none.
        is_heavy: its backward does not need its result, and its time makes a slice of a batch worth its name.
        weigh: the weights of a use, with what its kernels on a CPU allocate underneath the dispatcher.
        hidden_bytes: what the kernels of its low-memory form, or of that one's backward, allocate at once on a CPU
            beyond the results, from its arguments and these.
        on_meta: its results for meta tensors. PyTorch finds them too, but by running decomposed operators in Python, up
            to twenty for one.
        needs_data: whether shapes depend on data, which meta tensors do not have, from the tensors among its arguments.
        to_run_with: where a CPU computes it with other kernels than those for meta tensors, so that it is run for the
            bytes that they take: gradients of its first results to run it backward with, laid out as is usual.
        chooses_by_mask: it does not convert its mask to the type that it computes in.
        copies_strided_gradients: its backward first makes a gradient contiguous.
        runs_uncompiled: compiled, it takes more memory: torch.compile copies its weights on a CPU.
        returns_view: its result is its own, and dense, and a view all the same.
        begins_graph: autograd's graph begins with its result, and holds that and its gradient.
        is_elementwise: it is, though some releases do not say so.
        is_convolution: cuDNN's settings say what it computes float32 in.
        from_either: its backward gives the same from its operand and from its result.
        summed: of a loss that adds up what it gives for rows: how, from the arguments of a call; None if it does not.
        on_cuda: what CUDA runs in its place, by its arguments; None where that is what PyTorch makes of it for tensors
            there.
        hidden_on_cuda: bytes that its kernels allocate on CUDA underneath the dispatcher, in the forward and in the
            backward, from its arguments.
        unfolded: what a call, by its arguments, may be made of instead; see :mod:`ogc.parser.passes.calls`.
    """

    target: Any
    low_memory: LowMemory | None = None
    live_arguments: tuple[int, ...] = ()
    live_if: int = 0
    along: Rule | None = None
    moves: bool = False
    sizes: int | None = None
    dims: int | None = None
    layer: Callable[[Arguments], tuple[Any, Any, Any, bool] | None] = lambda args: None
    is_heavy: bool = False
    weigh: Callable[[Use], Weights] = lambda use: use.weights
    hidden_bytes: Callable[[Arguments, list[torch.Tensor]], int] = lambda args, results: 0
    on_meta: Callable[..., Any] | None = None
    needs_data: Callable[[list[torch.Tensor]], bool] = lambda tensors: False
    to_run_with: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
    chooses_by_mask: bool = False
    copies_strided_gradients: bool = False
    runs_uncompiled: bool = False
    returns_view: bool = False
    begins_graph: bool = False
    is_elementwise: bool = False
    is_convolution: bool = False
    from_either: bool = False
    summed: Callable[[Arguments], Summed | None] = lambda args: None
    on_cuda: Callable[[Arguments, dict[str, Any], Gpu], CudaKernel | None] | None = None
    hidden_on_cuda: Callable[[Arguments], tuple[int, int]] = lambda args: (0, 0)
    unfolded: Callable[[Arguments, dict[str, Any]], Callable[..., Any] | None] | None = None

    @property
    def has_rule(self) -> bool:
        """Whether there is a rule for what its kernels on a CPU allocate."""
        return self.weigh is not _ORDINARY.weigh

    def kernel_on_cuda(self, args: Arguments, kwargs: dict[str, Any], gpu: Gpu) -> CudaKernel | None:
        """What a GPU runs in its place, if that is another."""
        return None if self.on_cuda is None else self.on_cuda(args, kwargs, gpu)


_ORDINARY = Operator(None)
_registered: dict[Any, Operator] = {}


def register(*operators: Operator) -> None:
    """Say what is special about operators.

    Raises:
        InputError: that has been said of one of them.
    """
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
    """What is special about an operator, or about the one that a low-memory form stands for."""
    return _registered.get(plain_operator(target), _ORDINARY)


def low_memory_form(target: Any, device: torch.device) -> LowMemory | None:
    """The drop-in for an operator on a device, if there is one."""
    form = None if isinstance(target, LowMemory) else of(target).low_memory
    return form if form is not None and form.is_for(device) else None


def updates_statistics(target: Any) -> bool:
    """Whether an operator may update arguments that its own result does not depend on."""
    return bool(target.live if isinstance(target, Compiled) else _kernel(target).live_arguments)


def said_to_be_written(target: Any, args: Arguments) -> list[torch.Tensor]:
    """The tensors that a call writes by its schema: not all kernels count that."""
    schema = schema_of(target)
    if schema is None or not schema.is_mutable:
        return []
    pairs = zip(schema.arguments, args, strict=False)
    return [t for a, t in pairs if a.alias_info and a.alias_info.is_write and isinstance(t, torch.Tensor)]


def live_arguments(target: Any, args: Arguments) -> list[Any]:
    """The arguments that a call updates and its own result does not depend on, as far as they are given."""
    if isinstance(target, Compiled):
        return [args[p] for p in target.live]
    operator = _kernel(target)
    is_live = operator.live_if < len(args) and args[operator.live_if] is True
    return [args[p] for p in operator.live_arguments if p < len(args)] if is_live else []


def _kernel(target: Any) -> Operator:
    return of(target.operator if isinstance(target, WithoutGrad) else target)


def copies_strided_gradients(target: Any) -> bool:
    """Whether the operator's backward kernel makes a gradient contiguous before it reads it."""
    own = target.copies_strided_gradients if isinstance(target, LowMemory) else None
    return of(target).copies_strided_gradients if own is None else own


def is_elementwise(target: Any) -> bool:
    """Whether the result is laid out as what it is computed from; a cumulative sum, for one, is not."""
    return torch.Tag.pointwise in getattr(plain_operator(target), "tags", ()) or of(target).is_elementwise


def along(target: Any, args: Arguments, axes: Axes) -> Along | None:
    """What a call in parts is, of which these axes are known; None where it must see the whole."""
    rule = of(target).along or (elementwise if is_elementwise(target) else None)
    return rule and rule(args, axes)


def out_of_place(target: Any) -> Any:
    """The operator without its underscore; None if it has none, or no such twin."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name, overload = schema_of(target).name.split("::")[1], overload_name(target)
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or overload not in packet.overloads():
        return None
    twin = getattr(packet, overload)
    kinds = [[str(argument.type) for argument in schema_of(one).arguments] for one in (twin, target)]
    if kinds[0] != kinds[1]:  # pow_(Tensor, Scalar) and pow(Scalar, Tensor) are both called Scalar
        return None
    return twin


def ones_like(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of all results, laid out as these are."""
    return [torch.ones_like(result) for result in results]


def run_for_bytes(*targets: Any) -> tuple[Operator, ...]:
    """Operators of which nothing is special but that shapes do not tell what a CPU takes; see ``to_run_with``."""
    return tuple(Operator(target, to_run_with=ones_like) for target in targets)


def like(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """What ``empty_like`` gives, sooner; the result of many operators for meta tensors."""
    return tensor.new_empty(tensor.shape) if tensor.is_contiguous() else torch.empty_like(tensor)

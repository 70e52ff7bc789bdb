"""Bytes of the gradients that are alive while each operation's backward runs.

A model of autograd's engine at the grain of storages: operations run backward in reverse order; the gradient of a
tensor waits for the backward of what made it, that of a parameter for all uses of the parameter; a second gradient is
added to the first, in place if nobody else holds one of them. Gradients may share storage. Recomputation changes none
of it. Source: torch/csrc/autograd/input_buffer.cpp and engine.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch.fx.node import map_aggregate

from ...operators.registry import copies_strided_gradients, is_elementwise, of
from ...operators.weights import InputGradient, Weights
from ...program.program import Gradients, TensorRef, tensor_leaves, without_autocast
from ...program.tensors import Layout, of_sum
from ...torch_state.private import OpOverload

LONG_FLOPS = 2e9
"""A call with more is not run where its operator is known to copy gradients of other layouts."""

Layouts = Mapping[int, Layout]
"""Layouts of gradients, by the number of the result; other results get none."""


class Argument(NamedTuple):
    """A tensor argument of an operation."""

    ref: TensorRef
    value: TensorRef | None = None  # the same if an operation made its storage, not an external
    receiver: TensorRef | None = None  # the tensor whose gradient its gradient is; None for a parameter
    kind: tuple[Any, ...] = ()  # type, shape, strides, and whether it is dense


class Output(NamedTuple):
    """A result of an operation."""

    ref: TensorRef
    bytes: int
    differentiable: bool = True
    layout: Layout | None = None  # of its gradients, as is usual; None: unknown


@dataclass(frozen=True)
class Rebase:
    """A write in place to a view, which autograd differentiates as one to its base."""

    argument: int  # the number of the view
    before: TensorRef  # stands for the base, as does ``after``
    after: TensorRef
    bytes: int


@dataclass(frozen=True)
class Backward:
    """The backward of one operation.

    ``relaid`` gives its weights, and ``copies_strided``, for gradients of other layouts, held by others or not.
    """

    outputs: tuple[Output, ...]
    arguments: tuple[Argument, ...]
    weights: Weights
    copies_strided: bool = False  # it first copies a gradient that is not dense
    is_start: bool = False  # its output starts autograd's graph: the gradient of that becomes a ``.grad``
    base: int | None = None  # the number of the output that stands for the base of the first one, a view
    relaid: Callable[[Layouts, bool], tuple[Weights, bool] | None] = lambda layouts, are_held: None

    def parameter(self, argument: int) -> TensorRef | None:
        """What an argument is that gets no gradient from the program."""
        return self.arguments[argument].ref if self.arguments[argument].receiver is None else None

    def through_base(self, rebase: Rebase) -> Backward:
        """The backward of the same operation where it writes a view.

        The gradient of the base is copied, and the view's part once more. What the operator's backward makes of the
        latter is written into the former. Source: ``CopySlices`` in torch/csrc/autograd/functions/tensor.cpp.
        """
        weights, part = self.weights, self.outputs[0].bytes
        groups = 1 + max((gradient.group for gradient in weights.gradients), default=0)
        copied = rebase.bytes + part

        def changed(gradient: InputGradient) -> InputGradient:
            if gradient.argument == rebase.argument:
                return InputGradient(gradient.argument, rebase.bytes, None, groups)
            if gradient.shares is not None:
                return replace(gradient, bytes=part, shares=None, group=groups + 1)
            return replace(gradient, reuses=None)

        arguments = list(self.arguments)
        arguments[rebase.argument] = arguments[rebase.argument]._replace(receiver=rebase.before)
        return Backward(
            outputs=(*(one._replace(layout=None) for one in self.outputs), Output(rebase.after, rebase.bytes)),
            arguments=tuple(arguments),
            weights=replace(
                weights,
                gradients=tuple(map(changed, weights.gradients)),
                working_bytes=weights.working_bytes + copied,
                first_bytes=weights.first_bytes + copied,
                late_bytes=weights.late_bytes and weights.late_bytes + copied,
            ),
            is_start=self.is_start,
            base=len(self.outputs),
        )


@dataclass(frozen=True)
class LiveGradients:
    """Bytes of gradients and temporaries around one operation's backward."""

    first: int  # once it asks for what was saved
    during: int
    late: int  # once it has let go of what it saved


def gradient_bytes(
    operations: Sequence[Backward], returned: Sequence[TensorRef], gradients: Gradients = "kept"
) -> tuple[list[LiveGradients], int]:
    """For each operation, the bytes of gradients alive around its backward; and those that the last one leaves in
    ``.grad`` where there was none.
    """
    engine = _Engine(operations, returned, gradients)
    found = []
    for op in reversed(operations):
        found.append(engine.run(op))
        engine.live += op.weights.aside_bytes
    found.reverse()
    return found, sum(engine.bytes[storage] for storage in engine.left)


def reached(operations: Sequence[Backward], ends: Sequence[TensorRef], storages: Mapping[TensorRef, int]) -> list[bool]:
    """For each operation, whether a backward from ``ends`` may come to it; a tensor stands for all in its storage."""
    known = {storages.get(ref, ref) for ref in ends}
    found = []
    for op in reversed(operations):
        found.append(any(out.differentiable and storages.get(out.ref, out.ref) in known for out in op.outputs))
        if found[-1]:
            known.update(storages.get(a.receiver, a.receiver) for a in op.arguments if a.receiver is not None)
    return found[::-1]


@dataclass(frozen=True)
class _Gradient:
    storage: int
    dense: bool = True
    contiguous: bool = True
    is_view: bool = False
    layout: Layout | None = None  # None: as is usual, or unknown


class _Engine:
    def __init__(self, operations: Sequence[Backward], returned: Sequence[TensorRef], gradients: Gradients) -> None:
        self.gradients = gradients
        self.left: set[int] = set()  # storages of new parameters' gradients
        self.waiting: dict[TensorRef, _Gradient] = {}
        self.bytes: list[int] = []  # of each storage
        self.owners: list[int] = []
        self.live = self.most = 0
        self.sizes = {out.ref: out.bytes for op in operations for out in op.outputs}
        self.parameter_uses = _parameter_uses(operations, returned)
        differentiable = {out.ref for op in operations for out in op.outputs if out.differentiable}
        for ref in returned:
            if ref in differentiable:  # not contiguous: it is not written over, as the caller may hold it
                self.receive(ref, _Gradient(self.allocate(self.sizes[ref]), contiguous=False), self.sizes[ref])

    def allocate(self, size: int) -> int:
        self.bytes.append(size)
        self.owners.append(1)
        self.live += size
        self.most = max(self.most, self.live)
        return len(self.bytes) - 1

    def release(self, gradient: _Gradient) -> None:
        self.owners[gradient.storage] -= 1
        if self.owners[gradient.storage] == 0:
            self.live -= self.bytes[gradient.storage]

    def receive(self, tensor: TensorRef, new: _Gradient, size: int) -> None:
        """Add a gradient to what waits for the tensor, in place if that is dense and nobody else's."""
        old = self.waiting.setdefault(tensor, new)
        if old is new:
            return
        if old.dense and self.owners[old.storage] == 1:
            self.release(new)
            return
        if new.dense and self.owners[new.storage] == 1:
            self.release(old)
            self.waiting[tensor] = new
            return
        layout = of_sum(old.layout, new.layout) if old.layout and new.layout else None
        contiguous = layout.is_contiguous if layout else old.contiguous
        self.waiting[tensor] = _Gradient(self.allocate(size), contiguous=contiguous, layout=layout)
        self.release(old)
        self.release(new)

    def run(self, op: Backward) -> LiveGradients:
        """One operation's backward."""
        self.most = before = self.live
        if op.base is not None:
            self._to_base([out.ref for out in op.outputs[: op.base]], op.outputs[op.base])
        incoming = {n: self.waiting.pop(out.ref) for n, out in enumerate(op.outputs) if out.ref in self.waiting}
        if not incoming:
            return LiveGradients(before, before, 0)
        if op.is_start:
            return self._keep(op.outputs[0].bytes, incoming[0], before)
        op, is_exact = self._as_given(op, incoming)
        weights = op.weights
        if self.gradients == "none" and weights.own_gradient_bytes:
            weights = replace(weights, working_bytes=weights.own_working_bytes)
        strided = sum(op.outputs[n].bytes for n, g in incoming.items() if not g.dense) if op.copies_strided else 0
        reused = {g.argument: mine for g in weights.gradients if (mine := self._written_over(incoming, g)) is not None}
        spared = sum(self.bytes[g.storage] for g in reused.values())
        self.most = max(self.most, self.live + weights.working_bytes + strided - (0 if weights.late_bytes else spared))
        early = self.most
        if weights.late_bytes:  # what it hands out is made once it has let go of what it saved
            self.most = self.live + weights.late_bytes + strided - spared
        handed = self._hand_out(weights.gradients, incoming, reused, is_exact)
        for gradient in incoming.values():
            self.release(gradient)
        for argument, gradient in handed:
            if (receiver := op.arguments[argument].receiver) is not None:
                self.receive(receiver, gradient, self.sizes[receiver])
        self._hand_to_parameters(op, handed)
        if weights.own_gradient_bytes and self.gradients != "kept":
            stepping = 0 if isinstance(self.gradients, str) else max(self.gradients.values(), default=0)
            self._stay(_Gradient(self.allocate(weights.own_gradient_bytes)), stepping)
        first = before + weights.first_bytes
        if weights.late_bytes:
            return LiveGradients(first, max(first, early), self.most)
        return LiveGradients(first, max(first, self.most - weights.ready_bytes), 0)

    def _as_given(self, op: Backward, incoming: dict[int, _Gradient]) -> tuple[Backward, bool]:
        """The backward from gradients of these layouts, and whether it is known for them."""
        usual = {n: op.outputs[n].layout for n in incoming}
        layouts = {n: layout for n, g in incoming.items() if (layout := g.layout or usual[n]) is not None}
        pairs = [(layouts[n], normal) for n, normal in usual.items() if normal is not None]
        if len(pairs) < len(incoming) or all(layout.is_like(normal) for layout, normal in pairs):
            return op, all(g.dense for g in incoming.values())
        found = op.relaid(layouts, any(self.owners[g.storage] > 1 for g in incoming.values()))
        return (op, False) if found is None else (replace(op, weights=found[0], copies_strided=found[1]), True)

    def _keep(self, size: int, gradient: _Gradient, before: int) -> LiveGradients:
        """A gradient becomes a ``.grad``, itself or, if it is held elsewhere or has gaps, as a copy.

        Source: torch/csrc/autograd/functions/accumulate_grad.h.
        """
        if not gradient.dense or self.owners[gradient.storage] > 1 or self.bytes[gradient.storage] != size:
            self.allocate(size)
            self.release(gradient)
        return LiveGradients(before, self.most, 0)

    def _to_base(self, views: Sequence[TensorRef], base: Output) -> None:
        """A gradient of a view becomes one of its base, and is added to what is there of that."""
        for gradient in [self.waiting.pop(view) for view in views if view in self.waiting]:
            self.receive(base.ref, _Gradient(self.allocate(base.bytes)), base.bytes)
            self.release(gradient)

    def _hand_to_parameters(self, op: Backward, handed: list[tuple[int, _Gradient]]) -> None:
        """Gradients of parameters are added to ``.grad`` after all results are handed on."""
        for argument, gradient in handed:
            parameter = op.parameter(argument)
            if parameter is None:
                continue
            size, waiting = self.bytes[gradient.storage], self.waiting.get(parameter)
            if waiting is not None and waiting.is_view:
                self.waiting[parameter] = _Gradient(self.allocate(size))
                self.release(waiting)
                self.release(gradient)
            else:
                self.receive(parameter, gradient, size)
        for given in op.weights.gradients:
            parameter = op.parameter(given.argument)
            if parameter is None:
                continue
            self.parameter_uses[parameter] -= 1
            if not self.parameter_uses[parameter] and parameter in self.waiting:
                self._accumulate(self.waiting.pop(parameter), op.arguments[given.argument], given)

    def _accumulate(self, gradient: _Gradient, parameter: Argument, given: InputGradient) -> None:
        """The gradient of a parameter is added to its ``.grad``, or becomes that, itself or as a copy.

        Source: as above.
        """
        if self.gradients == "kept":
            self.release(gradient)
            return
        is_held = self.owners[gradient.storage] > 1 and not gradient.is_view
        is_sparse = not given.dense and given.layout is None
        if (is_held or not gradient.dense) and parameter.kind and not is_sparse:
            dtype, shape = parameter.kind[:2]
            copied = _Gradient(self.allocate(prod(shape) * dtype.itemsize))
            self.release(gradient)
            gradient = copied
        shape = parameter.kind[1] if parameter.kind else ()
        self._stay(gradient, 0 if isinstance(self.gradients, str) else self.gradients.get(shape, 0))

    def _stay(self, gradient: _Gradient, stepping: int) -> None:
        """A gradient is a ``.grad``, until the optimizer's step where hooks do not make that at once."""
        if isinstance(self.gradients, str):
            self.left.add(gradient.storage)
        else:
            self.release(_Gradient(self.allocate(stepping)))
            self.release(gradient)

    def _written_over(self, incoming: dict[int, _Gradient], gradient: InputGradient) -> _Gradient | None:
        """The incoming gradient whose storage the operation's own takes over, if that is nobody else's."""
        found = None if gradient.reuses is None else incoming.get(gradient.reuses)
        if found is None or not found.contiguous or self.owners[found.storage] != 1:
            return None
        return found if self.bytes[found.storage] == gradient.bytes else None

    def _hand_out(
        self,
        gradients: Sequence[InputGradient],
        incoming: dict[int, _Gradient],
        reused: dict[int, _Gradient],
        is_exact: bool,
    ) -> list[tuple[int, _Gradient]]:
        """The gradients that the operation returns, one reference each, by argument.

        ``is_exact`` says that it was weighed with gradients of the incoming ones' layouts.
        """
        groups: dict[int, int] = {}
        handed = []
        for gradient in gradients:
            source = reused.get(gradient.argument)
            if source is None and gradient.shares is not None:
                if gradient.shares not in incoming:
                    continue
                source = incoming[gradient.shares]
            storage = source.storage if source is not None else groups.get(gradient.group)
            if storage is not None:
                self.owners[storage] += 1
            else:
                storage = groups[gradient.group] = self.allocate(gradient.bytes)
            layout = gradient.layout if is_exact else None
            if source is not None and (gradient.argument in reused or gradient.layout is None):
                layout = source.layout
            dense = gradient.dense and (source is None or source.dense or (is_exact and gradient.layout is not None))
            contiguous = gradient.contiguous and (source is None or source.contiguous)
            handed.append((gradient.argument, _Gradient(storage, dense, contiguous, gradient.is_view, layout)))
        return handed


def _parameter_uses(operations: Sequence[Backward], returned: Sequence[TensorRef]) -> Counter[TensorRef]:
    """How many operations that the backward reaches give each parameter a gradient."""
    known = set(returned)
    uses: Counter[TensorRef] = Counter()
    for op in reversed(operations):
        if known.isdisjoint(out.ref for out in op.outputs if out.differentiable):
            continue
        for gradient in op.weights.gradients:
            argument = op.arguments[gradient.argument]
            if argument.receiver is None:
                uses[argument.ref] += 1
            else:
                known.add(argument.receiver)
    return uses


@dataclass(frozen=True)
class Change:
    """How gradients of other layouts change the weights of a backward."""

    gradients: tuple[InputGradient, ...]
    more: int  # bytes that it allocates beyond what it does for usual gradients
    working: int | None = None  # bytes that PyTorch's operator allocates, if that was measured
    has_copies: bool = False  # the copies that kernels make unseen are in these
    first: int = 0  # bytes allocated until it asks for what the forward saved

    def weights(self, usual: Weights) -> Weights:
        """The weights of the call in this form."""
        new = {gradient.argument: gradient for gradient in self.gradients}
        gradients = (replace(new.get(g.argument, g), reuses=g.reuses) for g in usual.gradients)
        return replace(
            usual,
            gradients=tuple(gradients),
            working_bytes=max(0, usual.working_bytes + self.more) if self.working is None else self.working,
            late_bytes=usual.late_bytes and max(0, usual.late_bytes + self.more),
            first_bytes=max(self.first, usual.first_bytes),
        )


class Relaid:
    """Weighs the backward of a call for gradients of other layouts than usual.

    Many kernels copy such a gradient first, and return another layout, too. Elementwise operators and views show this
    on shapes alone. Others are run on zeros, with usual gradients and with these, and the difference is added.

    Args:
        target, args, kwargs: the call; content is not held.
        usual: layouts of gradients of its results.
        run: weighs the call on shapes alone, for gradients of some layouts.
        measure: runs the backward of the call, or of its low-memory variant, for gradients of some layouts,
            shared or not; gives the bytes that it allocates, those until it asks for what was saved, and its
            results' layouts. None: it is weighed on shapes alone.
    """

    def __init__(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        usual: Layouts,
        run: Callable[[Any, Any, Layouts], Weights],
        measure: Callable[[Any, Any, Layouts, bool, bool], tuple[int, int, Layouts]] | None,
    ) -> None:
        self.target, self.usual, self.run, self.measure = target, usual, run, measure
        first = tensor_leaves(args, kwargs)[0]
        self.device, self.dtype = first.device, first.dtype
        self.args, self.kwargs = map_aggregate((args, kwargs), _shadow)
        self.found: dict[Any, Change | None] = {}

    def __call__(self, layouts: Layouts, is_low_memory: bool, are_held: bool) -> Change | None:
        """What changes, in one form, for these gradients, which others hold, too, or not; None if nobody can tell."""
        key = frozenset(layouts.items()), is_low_memory, are_held
        if key not in self.found:
            is_told = not of(self.target).needs_data(tensor_leaves(self.args, self.kwargs))
            self.found[key] = self._weighed(layouts, is_low_memory, are_held) if is_told else None
        return self.found[key]

    def _weighed(self, layouts: Layouts, is_low_memory: bool, are_held: bool) -> Change | None:
        ordinary = {n: self.usual[n] for n in layouts}
        with torch.enable_grad(), without_autocast():
            try:
                usual, found = (self.run(self.args, self.kwargs, given) for given in (ordinary, layouts))
            except (NotImplementedError, RuntimeError):  # no kernel for shapes alone
                return None
            more = found.working_bytes - usual.working_bytes
            if self.measure is None or _shows_all(self.target):
                return Change(found.gradients, more)
            if usual.forward_flops > LONG_FLOPS and copies_strided_gradients(self.target):
                more = sum(prod(layout.shape) * self.dtype.itemsize for layout in layouts.values())
                return Change(found.gradients, more, has_copies=True)
            given = map_aggregate((self.args, self.kwargs), self._filled)
            try:
                before, _, _ = self.measure(*given, ordinary, is_low_memory, are_held)
                working, first, results = self.measure(*given, layouts, is_low_memory, are_held)
            except RuntimeError:  # it does not take zeros
                return Change(found.gradients, more)
            gradients = tuple(_laid_out(gradient, results.get(gradient.argument)) for gradient in found.gradients)
            return Change(gradients, working - before, None if is_low_memory else working, True, first)

    def _filled(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return Layout.of(leaf).zeros(leaf.dtype, self.device).requires_grad_(leaf.requires_grad)


def _shadow(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shadow = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return shadow.requires_grad_(leaf.requires_grad)


def _laid_out(gradient: InputGradient, layout: Layout | None) -> InputGradient:
    """The gradient as it is laid out where that was seen."""
    if layout is None or not gradient.dense or gradient.is_view:
        return gradient
    return replace(gradient, contiguous=layout.is_contiguous, layout=layout)


def _shows_all(target: Any) -> bool:
    """Whether all that an operator's backward allocates is seen on shapes alone."""
    return is_elementwise(target) or (isinstance(target, OpOverload) and target.is_view)

"""Which gradients are alive while each operation's backward runs.

A model of autograd's engine at the grain of storages: operations run backward in reverse order, the
gradient of a tensor waits until its producer's turn, a second gradient for the same tensor is added to the
first, in place if one of the two is nobody else's. That of a parameter waits for all uses of the parameter, too,
before it is added to ``.grad``. Gradients may share storage (an addition hands the same one
to both sides; a concatenation hands out slices), which decides how long its bytes stay.

Checkpointing never changes any of it: the numbers belong to the graph, not to a plan.
Source: torch/csrc/autograd/input_buffer.cpp and engine.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...operators.weights import InputGradient
from ...program.program import TensorRef
from ...program.tensors import Layout, of_sum
from .backward.again import Layouts

Storages = Mapping[TensorRef, int]
"""The number of the value in which a tensor of the program is."""


@dataclass(frozen=True)
class Rebase:
    """A write in place to a view, which autograd differentiates as one to the whole tensor that it is a view of.

    ``before`` and ``after`` stand for that tensor, ``argument`` is the number of the view.
    """

    argument: int
    before: TensorRef
    after: TensorRef
    bytes: int


@dataclass(frozen=True)
class OperationGradients:
    """The backward of one operation: its tensors and its profile."""

    outputs: tuple[TensorRef, ...]
    output_bytes: tuple[int, ...]
    differentiable: tuple[bool, ...]
    arguments: tuple[TensorRef | None, ...]
    gradients: tuple[InputGradient, ...]
    working_bytes: int  # most bytes that its backward allocates, results included
    late_bytes: int = 0  # the same once it has let go of what it saved, if it does so before it is done
    ready_bytes: int = 0  # of its gradients, those that are there before
    first_bytes: int = 0  # what its backward has allocated once it asks for what was saved
    copies_strided: bool = False  # its backward first copies a gradient that is not dense
    sources: tuple[TensorRef, ...] = ()  # what each argument is, be it made by the program or not
    base: int | None = None  # the output that stands for the whole tensor that the first output is a view of
    is_start: bool = False  # its output starts autograd's graph: its gradient is the ``.grad`` of that
    usual: tuple[Layout, ...] = ()  # how gradients of its outputs are laid out unless there is a reason
    again: Callable[[Layouts, bool], OperationGradients | None] | None = None  # the same for others, held or not

    def parameter(self, argument: int) -> TensorRef | None:
        """What an argument is that the program did not make."""
        return self.sources[argument] if self.sources and self.arguments[argument] is None else None

    def through_base(self, rebase: Rebase) -> OperationGradients:
        """The backward of the same operation where it writes a view.

        The gradient of the whole is copied, the view's part of it copied once more and given to the operator's
        own backward; what that returns for the view is written into the first copy, which is then handed on.
        Source: ``CopySlices`` in torch/csrc/autograd/functions/tensor.cpp.
        """
        part = self.output_bytes[0]
        groups = 1 + max((gradient.group for gradient in self.gradients), default=0)

        def changed(gradient: InputGradient) -> InputGradient:
            if gradient.argument == rebase.argument:
                return InputGradient(gradient.argument, rebase.bytes, None, groups)
            if gradient.shares is not None:
                return replace(gradient, bytes=part, shares=None, group=groups + 1)
            return replace(gradient, reuses=None)

        copied = rebase.bytes + part
        return replace(
            self,
            outputs=(*self.outputs, rebase.after),
            output_bytes=(*self.output_bytes, rebase.bytes),
            differentiable=(*self.differentiable, True),
            arguments=tuple(rebase.before if n == rebase.argument else a for n, a in enumerate(self.arguments)),
            gradients=tuple(map(changed, self.gradients)),
            working_bytes=self.working_bytes + copied,
            first_bytes=self.first_bytes + copied,
            late_bytes=self.late_bytes and self.late_bytes + copied,
            copies_strided=False,
            base=len(self.outputs),
            usual=(),
            again=None,
        )


@dataclass(frozen=True)
class LiveGradients:
    """Bytes of gradients and temporaries around one operation's backward."""

    first: int  # once it asks for what was saved
    during: int
    late: int  # once it has let go of what it saved


@dataclass(frozen=True)
class _Gradient:
    storage: int
    dense: bool
    contiguous: bool
    is_view: bool = False
    layout: Layout | None = None  # None: as is usual, or nobody knows


def gradient_bytes(operations: Sequence[OperationGradients], returned: Sequence[TensorRef]) -> list[LiveGradients]:
    """For each operation, the bytes of gradients alive around its backward."""
    engine = _Engine(_parameter_uses(operations, returned))
    sizes = {ref: size for op in operations for ref, size in zip(op.outputs, op.output_bytes, strict=True)}
    grads = {ref for op in operations for ref, flag in zip(op.outputs, op.differentiable, strict=True) if flag}
    for ref in returned:
        if ref in grads:
            # Not to be written over: the caller may hold it.
            engine.receive(ref, _Gradient(engine.allocate(sizes[ref]), True, False), sizes[ref])
    return [engine.run(op, sizes) for op in reversed(operations)][::-1]


def _parameter_uses(operations: Sequence[OperationGradients], returned: Sequence[TensorRef]) -> Counter[TensorRef]:
    """How many operations that the backward reaches give each parameter a gradient."""
    reached = set(returned)
    uses: Counter[TensorRef] = Counter()
    for op in reversed(operations):
        if reached.isdisjoint(ref for ref, flag in zip(op.outputs, op.differentiable, strict=True) if flag):
            continue
        for gradient in op.gradients:
            made, parameter = op.arguments[gradient.argument], op.parameter(gradient.argument)
            reached.update([made] if made else [])
            uses.update([parameter] if parameter else [])
    return uses


def reached(operations: Sequence[OperationGradients], ends: Sequence[TensorRef], storages: Storages) -> list[bool]:
    """For each operation, whether a backward from ``ends`` may come to it.

    A tensor stands for all that share its storage, so that nothing is left out.
    """
    known = {storages.get(ref, ref) for ref in ends}
    found = []
    for op in reversed(operations):
        made = zip(op.outputs, op.differentiable, strict=True)
        found.append(any(flag and storages.get(ref, ref) in known for ref, flag in made))
        if found[-1]:
            known.update(storages.get(ref, ref) for ref in op.arguments if ref is not None)
    return found[::-1]


class _Engine:
    def __init__(self, parameter_uses: Counter[TensorRef]) -> None:
        self.parameter_uses = parameter_uses
        self.waiting: dict[TensorRef, _Gradient] = {}
        self.bytes: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.live = 0
        self.most = 0

    def allocate(self, size: int) -> int:
        storage = len(self.bytes)
        self.bytes[storage] = size
        self.owners[storage] = 1
        self.live += size
        self.most = max(self.most, self.live)
        return storage

    def release(self, storage: int) -> None:
        self.owners[storage] -= 1
        if self.owners[storage] == 0:
            self.live -= self.bytes[storage]

    def receive(self, tensor: TensorRef, new: _Gradient, size: int) -> None:
        """Hand one reference of a gradient to the tensor."""
        if tensor not in self.waiting:
            self.waiting[tensor] = new
            return
        old = self.waiting[tensor]
        if old.dense and self.owners[old.storage] == 1:
            self.release(new.storage)  # added in place
            return
        if new.dense and self.owners[new.storage] == 1:
            self.release(old.storage)  # added in place to the newcomer
            self.waiting[tensor] = new
            return
        layout = of_sum(old.layout, new.layout) if old.layout and new.layout else None
        contiguous = layout.is_contiguous if layout else old.contiguous
        self.waiting[tensor] = _Gradient(self.allocate(size), True, contiguous, layout=layout)
        self.release(old.storage)
        self.release(new.storage)

    def run(self, op: OperationGradients, sizes: dict[TensorRef, int]) -> LiveGradients:
        """One operation's backward."""
        self.most = before = self.live
        if op.base is not None:
            self._to_the_whole(op.outputs[: op.base], op.outputs[op.base], op.output_bytes[op.base])
        incoming = {n: self.waiting.pop(ref) for n, ref in enumerate(op.outputs) if ref in self.waiting}
        if not incoming:
            return LiveGradients(before, before, 0)
        if op.is_start:
            return self._keep(op.output_bytes[0], incoming[0], before)
        op, is_exact = _as_given(op, incoming, any(self.owners[g.storage] > 1 for g in incoming.values()))
        strided = sum(op.output_bytes[n] for n, g in incoming.items() if not g.dense) if op.copies_strided else 0
        reused = {g.argument: mine for g in op.gradients if (mine := self._written_over(incoming, g)) is not None}
        saved = sum(self.bytes[g.storage] for g in reused.values())
        self.most = max(self.most, self.live + op.working_bytes + strided - (0 if op.late_bytes else saved))
        early = self.most
        if op.late_bytes:  # what it hands out is made once it has let go of what it saved
            self.most = self.live + op.late_bytes + strided - saved
        handed = self._hand_out(op, incoming, reused, is_exact)
        for gradient in incoming.values():
            self.release(gradient.storage)
        for argument, gradient in handed:
            tensor = op.arguments[argument]
            if tensor is not None:
                self.receive(tensor, gradient, sizes[tensor])
        self._hand_to_parameters(op, handed)
        first = before + op.first_bytes
        if op.late_bytes:
            return LiveGradients(first, max(first, early), self.most)
        return LiveGradients(first, max(first, self.most - op.ready_bytes), 0)

    def _keep(self, size: int, gradient: _Gradient, before: int) -> LiveGradients:
        """A gradient becomes a ``.grad`` that stays, itself or, if somebody else holds it or has gaps, as a copy.

        Source: torch/csrc/autograd/functions/accumulate_grad.h.
        """
        if not gradient.dense or self.owners[gradient.storage] > 1 or self.bytes[gradient.storage] != size:
            self.allocate(size)
            self.release(gradient.storage)
        return LiveGradients(before, self.most, 0)

    def _to_the_whole(self, views: Sequence[TensorRef], whole: TensorRef, size: int) -> None:
        """A gradient of a view becomes one of the whole, and is added to what is there of it."""
        for gradient in [self.waiting.pop(view) for view in views if view in self.waiting]:
            self.receive(whole, _Gradient(self.allocate(size), True, True), size)
            self.release(gradient.storage)

    def _hand_to_parameters(self, op: OperationGradients, handed: list[tuple[int, _Gradient]]) -> None:
        """Parameter gradients are added to .grad once the operation has handed all its results on."""
        for argument, gradient in handed:
            parameter = op.parameter(argument)
            waiting = self.waiting.get(parameter) if parameter else None
            if parameter and waiting and waiting.is_view:
                self.waiting[parameter] = _Gradient(self.allocate(self.bytes[gradient.storage]), True, True)
                self.release(waiting.storage)
                self.release(gradient.storage)
            elif parameter:
                self.receive(parameter, gradient, self.bytes[gradient.storage])
            elif op.arguments[argument] is None:
                self.release(gradient.storage)
        for parameter in filter(None, (op.parameter(gradient.argument) for gradient in op.gradients)):
            self.parameter_uses[parameter] -= 1
            if not self.parameter_uses[parameter] and parameter in self.waiting:
                self.release(self.waiting.pop(parameter).storage)

    def _written_over(self, incoming: dict[int, _Gradient], gradient: InputGradient) -> _Gradient | None:
        """The incoming gradient whose storage the operation's own takes over, if that is nobody else's."""
        found = None if gradient.reuses is None else incoming.get(gradient.reuses)
        if found is None or not found.contiguous or self.owners[found.storage] != 1:
            return None
        return found if self.bytes[found.storage] == gradient.bytes else None

    def _hand_out(
        self, op: OperationGradients, incoming: dict[int, _Gradient], reused: dict[int, _Gradient], is_exact: bool
    ) -> list[tuple[int, _Gradient]]:
        """The gradients that the operation returns, one reference each, by argument.

        ``is_exact`` says that it was weighed with gradients that are laid out as the incoming ones.
        """
        groups: dict[int, int] = {}
        handed = []
        for gradient in op.gradients:
            source = reused.get(gradient.argument)
            if source is None and gradient.shares is not None:
                if gradient.shares not in incoming:
                    continue
                source = incoming[gradient.shares]
            if source is not None:
                storage = source.storage
                self.owners[storage] += 1
            elif gradient.group in groups:
                storage = groups[gradient.group]
                self.owners[storage] += 1
            else:
                storage = groups[gradient.group] = self.allocate(gradient.bytes)
            layout = gradient.layout if is_exact else None
            if source is not None and (gradient.argument in reused or gradient.layout is None):
                layout = source.layout
            # What the caller may hold is called strided, so that nothing is written over it.
            dense = gradient.dense and (source is None or (source.dense or (is_exact and gradient.layout is not None)))
            contiguous = gradient.contiguous and (source is None or source.contiguous)
            handed.append((gradient.argument, _Gradient(storage, dense, contiguous, gradient.is_view, layout)))
        return handed


def _as_given(
    op: OperationGradients, incoming: dict[int, _Gradient], are_held: bool
) -> tuple[OperationGradients, bool]:
    """The operation's backward from gradients that are laid out as these, and held, and whether it is known."""
    if not op.usual or all(g.layout is None or g.layout.is_like(op.usual[n]) for n, g in incoming.items()):
        return op, all(g.dense for g in incoming.values())
    layouts = {n: g.layout or op.usual[n] for n, g in incoming.items()}
    found = None if op.again is None else op.again(layouts, are_held)
    return (op, False) if found is None else (found, True)

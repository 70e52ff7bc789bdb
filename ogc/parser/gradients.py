"""Which gradients are alive while each operation's backward runs.

A model of autograd's engine at the grain of storages: operations run backward in reverse order, the
gradient of a tensor waits until its producer's turn, a second gradient for the same tensor is added to the
first, in place if one of the two is nobody else's. Gradients may share storage (an addition hands the same one
to both sides; a concatenation hands out slices), which decides how long its bytes stay.

Checkpointing never changes any of it: the numbers belong to the graph, not to a plan.
Source: torch/csrc/autograd/input_buffer.cpp and engine.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..program import TensorRef


@dataclass(frozen=True)
class InputGradient:
    """The gradient that an operation's backward returns for one of its tensor arguments.

    ``shares`` is the number of the output whose gradient it shares storage with; else it is new and
    ``group`` numbers the operation's new storages, of ``bytes`` each.
    """

    argument: int
    bytes: int
    shares: int | None
    group: int = 0
    dense: bool = True


@dataclass(frozen=True)
class OperationGradients:
    """The backward of one operation: its tensors and its profile."""

    outputs: tuple[TensorRef, ...]
    output_bytes: tuple[int, ...]
    differentiable: tuple[bool, ...]
    arguments: tuple[TensorRef | None, ...]
    gradients: tuple[InputGradient, ...]
    working_bytes: int  # most bytes that its backward allocates, results included
    copies_strided: bool = False  # its backward first copies a gradient that is not dense


def gradient_bytes(operations: Sequence[OperationGradients], returned: Sequence[TensorRef]) -> list[tuple[int, int]]:
    """For each operation, the gradient bytes alive before its backward, and at most during it."""
    engine = _Engine()
    sizes = {ref: size for op in operations for ref, size in zip(op.outputs, op.output_bytes, strict=True)}
    grads = {ref for op in operations for ref, flag in zip(op.outputs, op.differentiable, strict=True) if flag}
    for ref in returned:
        if ref in grads:
            engine.receive(ref, engine.allocate(sizes[ref]), True, sizes[ref])
    result = []
    for op in reversed(operations):
        before = engine.live
        result.append((before, engine.run(op, sizes)))
    return result[::-1]


class _Engine:
    def __init__(self) -> None:
        self.waiting: dict[TensorRef, tuple[int, bool]] = {}  # tensor -> (gradient storage, dense)
        self.bytes: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.live = 0
        self.most = 0

    def allocate(self, size: int) -> int:
        storage = len(self.bytes)
        self.bytes[storage] = size
        self.owners[storage] = 1
        self._grow(size)
        return storage

    def release(self, storage: int) -> None:
        self.owners[storage] -= 1
        if self.owners[storage] == 0:
            self.live -= self.bytes[storage]

    def receive(self, tensor: TensorRef, storage: int, dense: bool, size: int) -> None:
        """Hand one reference of ``storage`` to the tensor's gradient."""
        if tensor not in self.waiting:
            self.waiting[tensor] = (storage, dense)
            return
        old, old_dense = self.waiting[tensor]
        if old_dense and self.owners[old] == 1:
            self.release(storage)  # added in place
            return
        if dense and self.owners[storage] == 1:
            self.release(old)  # added in place to the newcomer
            self.waiting[tensor] = (storage, True)
            return
        self.waiting[tensor] = (self.allocate(size), True)
        self.release(old)
        self.release(storage)

    def run(self, op: OperationGradients, sizes: dict[TensorRef, int]) -> int:
        """One operation's backward; the most bytes alive during it."""
        self.most = self.live
        incoming = {n: self.waiting.pop(ref) for n, ref in enumerate(op.outputs) if ref in self.waiting}
        if not incoming:
            return self.live
        strided = sum(self.bytes[s] for s, dense in incoming.values() if not dense) if op.copies_strided else 0
        self.most = max(self.most, self.live + op.working_bytes + strided)
        groups: dict[int, int] = {}
        handed: list[tuple[InputGradient, int]] = []
        for gradient in op.gradients:
            if gradient.shares is not None:
                if gradient.shares in incoming:
                    storage = incoming[gradient.shares][0]
                    self.owners[storage] += 1
                    handed.append((gradient, storage))
            elif gradient.group in groups:
                self.owners[groups[gradient.group]] += 1
                handed.append((gradient, groups[gradient.group]))
            else:
                groups[gradient.group] = self.allocate(gradient.bytes)
                handed.append((gradient, groups[gradient.group]))
        for storage, _ in incoming.values():
            self.release(storage)
        for gradient, storage in handed:
            tensor = op.arguments[gradient.argument]
            if tensor is not None:
                shared_dense = gradient.shares is None or incoming[gradient.shares][1]
                self.receive(tensor, storage, gradient.dense and shared_dense, sizes[tensor])
        # Parameter gradients are added to .grad once the operation has handed all its results on.
        for gradient, storage in handed:
            if op.arguments[gradient.argument] is None:
                self.release(storage)
        return self.most

    def _grow(self, size: int) -> None:
        self.live += size
        self.most = max(self.most, self.live)

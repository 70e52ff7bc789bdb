"""What operations do to the memory of their program: a record of each, and the storages that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch

from ...operators.low_memory import LowMemory
from ...operators.registry import live_arguments
from ...operators.weights import Place, Weights
from ...program.leaf import Leaf
from ...program.program import Saved, TensorRef, has_history, tensor_leaves
from ...program.tensors import ByStorage, Layout, is_dense
from ...torch_state.private import base_of, storage_id, version_alone, version_of
from .backward.again import Again
from .gradients import Rebase

T = TypeVar("T")


@dataclass(frozen=True)
class SeenForm:
    """The low-memory form of an operation, and what it saves in the operator's place."""

    target: LowMemory
    saves: tuple[Saved, ...]
    internal_bytes: int


@dataclass
class Record:
    """What one operation was seen to do. Value numbers count storages in the order of their making."""

    node: torch.fx.Node
    arguments: list[TensorRef | None] = field(default_factory=list)  # per tensor argument; None: external
    sources: list[TensorRef] = field(default_factory=list)  # per tensor argument; what it is, external or not
    outputs: list[TensorRef] = field(default_factory=list)
    output_bytes: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    saves: list[Saved] = field(default_factory=list)
    saved_values: list[int] = field(default_factory=list)
    internal_bytes: int = 0
    reads_external: list[int] = field(default_factory=list)
    writes_external: list[int] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)  # per output
    receivers: list[TensorRef | None] = field(default_factory=list)  # per tensor argument; whose gradient its is
    rebase: Rebase | None = None
    layouts: list[tuple[Any, ...]] = field(default_factory=list)  # per tensor argument: type, shape, strides, dense
    random: bool = False
    form: SeenForm | None = None
    bindings: dict[Any, str] = field(default_factory=dict)  # see Program
    weights: Weights = field(default_factory=Weights)
    aside: list[TensorRef] = field(default_factory=list)  # arguments that it holds beside what it saves
    usual: list[Layout] = field(default_factory=list)  # per output; how its gradient is laid out
    again: Again | None = None  # weighs its backward for gradients that are laid out in another way

    @property
    def in_place(self) -> bool:
        """Whether it writes what it was given."""
        return bool(self.writes_external) or any(value in self.reads for value in self.writes)

    def take_saves(self, storages: dict[TensorRef, int]) -> None:
        """Save what its weights say that it saves on another device, if they do."""
        if self.weights.saves is None:
            return
        self.saves = list(saved_at(self, self.weights.saves))
        self.saved_values = list(dict.fromkeys(storages[s.tensor] for s in self.saves if s.tensor in storages))

    def forget_saves(self) -> None:
        """Nothing that it saves outlives its results, as no backward comes to it."""
        self.weights = replace(self.weights, internal_bytes=None, saves=None, low_memory=None)
        self.saves = [saved if saved.external else Saved(unneeded=True) for saved in self.saves]
        self.saved_values, self.internal_bytes, self.form = [], 0, None


def saved_at(record: Record, places: Sequence[Place | None]) -> tuple[Saved, ...]:
    """What a recorded call saves at these places."""
    return tuple(_saved(record, place) for place in places)


def _saved(record: Record, place: Place | None) -> Saved:
    if place is None:
        return Saved()
    (is_result, number), layout = place
    ref = TensorRef(record.node.name, number) if is_result else record.arguments[number]
    return Saved(external=True) if ref is None else Saved(ref, layout)


class Span(NamedTuple):
    """Memory that the plain forward has, and no program, from one of its calls to another."""

    first: int
    last: int
    bytes: int


class Overwritten(NamedTuple):
    """A value that an operation wrote after another one had saved that part of it, so that no backward may use it."""

    value: int
    saver: Record
    writer: Record


@dataclass
class Observation:
    """One record per operation, and what the program made; ``inputs`` are the externals that it was given."""

    records: list[Record]
    value_bytes: list[int]
    value_names: list[str]
    storages: dict[TensorRef, int]
    outputs: list[torch.Tensor]
    output_values: set[int]
    inputs: frozenset[int] = frozenset()
    rebased: dict[TensorRef, TensorRef] = field(default_factory=dict)  # see Rebase: what stands for a tensor at the end
    grad_targets: frozenset[Any] = frozenset()
    unused: Sequence[Span] = ()  # what the plain forward makes besides, and nothing uses
    held: dict[int, int] = field(default_factory=dict)  # the last operation during which the plain forward does
    overwritten: list[Overwritten] = field(default_factory=list)

    def take_saves(self) -> None:
        """Let operations save what their weights say that they save on another device."""
        for record in self.records:
            record.take_saves(self.storages)

    def new_value(self, name: str, size: int) -> int:
        """The number of a value more, of so many bytes."""
        self.value_names.append(name)
        self.value_bytes.append(size)
        return len(self.value_bytes) - 1


class Memory:
    """The storages of a program that runs, by identity: values, which it makes, and externals, each numbered from 0."""

    def __init__(self) -> None:
        self.values: ByStorage[int] = ByStorage()
        self.externals: dict[int, int] = {}
        self.views: dict[int, list[TensorRef]] = {}  # the program tensors in each value
        self.views_of_externals: set[TensorRef] = set()  # such as slices of a parameter, with gradients of their own
        self.saved: dict[int, list[tuple[Record, torch.Tensor, int]]] = {}  # by value: who saved it, at which version
        self.result = Observation([], [], [], {}, [], set())  # what was seen so far

    def external(self, tensor: Any) -> Any:
        """The tensor, now known to be an external; the module of a leaf is left alone."""
        if isinstance(tensor, torch.Tensor):
            self.externals.setdefault(storage_id(tensor), len(self.externals))
        return tensor

    def external_number(self, tensor: torch.Tensor) -> int:
        """The number of an external; one that is new is that of a parameter which a leaf moved."""
        return self.externals[storage_id(self.external(tensor))]

    def value(self, tensor: torch.Tensor) -> int | None:
        """The number of the value that a tensor is in, or None."""
        return self.values.get(tensor.untyped_storage())

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in a value or an external."""
        return self.value(tensor) is not None or storage_id(tensor) in self.externals

    def note_reads(self, record: Record, refs: list[TensorRef], tensors: list[torch.Tensor]) -> None:
        for ref, tensor in zip(refs, tensors, strict=True):
            value = self.value(tensor)
            record.arguments.append(ref if value is not None else None)
            is_made = value is not None or ref in self.views_of_externals
            record.receivers.append(self.result.rebased.get(ref, ref) if is_made else None)
            record.sources.append(ref)
            record.layouts.append((tensor.dtype, tuple(tensor.shape), tensor.stride(), is_dense(tensor)))
            if value is not None:
                _add(record.reads, value)
            else:
                _add(record.reads_external, self.external_number(tensor))

    def note_outputs(self, record: Record, result: Any) -> None:
        for index, tensor in enumerate(tensor_leaves(result)):
            ref = TensorRef(record.node.name, index)
            if not self.knows(tensor):
                number = len(self.result.value_bytes)
                self.values[tensor.untyped_storage()] = number
                self.result.value_bytes.append(tensor.untyped_storage().nbytes())
                self.result.value_names.append(record.node.name if index == 0 else f"{record.node.name}.{index}")
                record.writes.append(number)
            known = self.value(tensor)
            if known is not None:
                self.result.storages[ref] = known
                self.views.setdefault(known, []).append(ref)
            else:
                self.views_of_externals.add(ref)
            record.outputs.append(ref)
            record.output_bytes.append(tensor.numel() * tensor.element_size())
            record.differentiable.append(has_history(tensor))
            record.usual.append(Layout.usual(tensor))

    def note_writes(self, record: Record, written: list[torch.Tensor], args: Any) -> None:
        harmless = {
            storage_id(live) for live in live_arguments(record.node.target, args) if isinstance(live, torch.Tensor)
        }
        for tensor in written:
            value = self.value(tensor)
            if value is not None:
                _add(record.writes, value)
                self._note_overwritten(record, value)
            elif storage_id(tensor) not in harmless:
                _add(record.writes_external, self.external_number(tensor))
        for key in harmless:
            number = self.externals.get(key)
            if number in record.reads_external:
                record.reads_external.remove(number)

    def _note_overwritten(self, record: Record, value: int) -> None:
        """Versions tell which of a value's tensors were written: parts that are no views of it have their own."""
        self.result.overwritten += [
            Overwritten(value, saver, record)
            for saver, tensor, version in self.saved.get(value, [])
            if version_of(tensor) != version
        ]

    def note_rebase(self, record: Record, tensors: list[torch.Tensor], histories: list[Any]) -> None:
        """What was read before the write to a view stands for the whole tensor as it is after it from here on."""
        for argument, (tensor, history) in enumerate(zip(tensors, histories, strict=True)):
            base, value = base_of(tensor), self.value(tensor)
            if base is None or value is None or type(base.grad_fn).__name__ != "CopySlices" or base.grad_fn is history:
                continue
            known = [ref for ref in self.views[value] if ref not in record.outputs]
            before, after = known[0], TensorRef(record.node.name, len(record.outputs))
            size = base.numel() * base.element_size()
            record.rebase = Rebase(argument, self.result.rebased.get(before, before), after, size)
            self.result.rebased.update(dict.fromkeys(known, after))
            return

    def note_saves(
        self, record: Record, packed: list[torch.Tensor], known: list[tuple[torch.Tensor, TensorRef]], result: Any
    ) -> None:
        known = [(t, TensorRef(record.node.name, n)) for n, t in enumerate(tensor_leaves(result))] + known
        internal: set[int] = set()
        for tensor in packed:
            saved = self._saved(tensor, known)
            record.saves.append(saved)
            value = self.value(tensor)
            key = storage_id(tensor)
            if saved.tensor is not None and value is not None:
                _add(record.saved_values, value)
                if (alone := version_alone(tensor)) is not None:
                    self.saved.setdefault(value, []).append((record, alone, version_of(tensor)))
            elif not saved.external and key not in internal:
                internal.add(key)
                record.internal_bytes += tensor.untyped_storage().nbytes()
        if isinstance(record.node.target, Leaf):
            # One slot for each argument that it saves in whatever way; the rest stays with it.
            given = {self.result.storages[ref]: Saved(ref) for ref in reversed(record.arguments) if ref is not None}
            record.saves = [given[value] for value in record.saved_values if value in given]

    def _saved(self, tensor: torch.Tensor, known: list[tuple[torch.Tensor, TensorRef]]) -> Saved:
        if self.knows(tensor) and self.value(tensor) is None:
            return Saved(external=True)
        found = alike(tensor, known)
        return Saved() if found is None else Saved(*found)


def alike(tensor: torch.Tensor, known: Sequence[tuple[torch.Tensor, T]]) -> tuple[T, Any] | None:
    """The name of the first known tensor that shares the storage, and the tensor's layout where that differs."""
    same = [(t, name) for t, name in known if _kind(t) == _kind(tensor)]
    for t, name in same:
        if layout_of(t) == layout_of(tensor):
            return name, None
    return (same[0][1], layout_of(tensor)) if same else None


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return storage_id(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def layout_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Its shape, strides and offset in entries."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _add(numbers: list[int], number: int) -> None:
    if number not in numbers:
        numbers.append(number)

"""What operations of a program do to memory: one record for each, with the storages that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch

from ...operators.low_memory import LowMemory
from ...operators.registry import copies_strided_gradients, of
from ...operators.weights import Place, Weights
from ...program.program import Saved, TensorRef
from ...torch_state.private import storage_id
from .backward import Argument, Backward, Layouts, Output, Rebase, Relaid

T = TypeVar("T")


@dataclass
class Externals:
    """Numbers of tensors that the program did not make."""

    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


@dataclass
class SavedTensors:
    """What autograd saves of a call."""

    tensors: list[Saved] = field(default_factory=list)
    values: list[int] = field(default_factory=list)  # that these are in
    internal_bytes: int = 0  # of those that are in no value


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
    arguments: list[Argument] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    externals: Externals = field(default_factory=Externals)
    saved: SavedTensors = field(default_factory=SavedTensors)
    rebase: Rebase | None = None
    random: bool = False
    form: SeenForm | None = None
    bindings: dict[Any, str] = field(default_factory=dict)  # see Program
    weights: Weights = field(default_factory=Weights)
    aside: list[TensorRef] = field(default_factory=list)  # arguments that it holds without telling autograd
    relaid: Relaid | None = None  # weighs its backward for gradients of other layouts

    @property
    def in_place(self) -> bool:
        """Whether it writes what it was given."""
        return bool(self.externals.writes) or any(value in self.reads for value in self.writes)

    def take_saves(self, storages: dict[TensorRef, int]) -> None:
        """Save what its weights say that it saves on another device, if they do."""
        if self.weights.saves is None:
            return
        self.saved.tensors = list(saved_at(self, self.weights.saves))
        made = (storages[s.tensor] for s in self.saved.tensors if s.tensor in storages)
        self.saved.values = list(dict.fromkeys(made))

    def forget_saves(self) -> None:
        """Nothing that it saves outlives its results, as no backward comes to it."""
        self.weights = replace(self.weights, internal_bytes=None, saves=None, low_memory=None)
        self.saved = SavedTensors([s if s.external else Saved(unneeded=True) for s in self.saved.tensors])
        self.form = None

    def backward(self, weights: Weights | None = None) -> Backward:
        """Its backward by these weights, or else by those of PyTorch's operator."""
        weights = weights or self.weights
        form = self.form.target if self.form and weights is self.weights.low_memory else None
        copies_strided = copies_strided_gradients(form or self.node.target)

        def relaid(layouts: Layouts, are_held: bool) -> tuple[Weights, bool] | None:
            found = None if self.relaid is None else self.relaid(layouts, form is not None, are_held)
            return None if found is None else (found.weights(weights), copies_strided and not found.has_copies)

        is_start = of(self.node.target).begins_graph
        found = Backward(tuple(self.outputs), tuple(self.arguments), weights, copies_strided, is_start, relaid=relaid)
        return found if self.rebase is None else found.through_base(self.rebase)


def saved_at(record: Record, places: Sequence[Place | None]) -> tuple[Saved, ...]:
    """What a recorded call saves at these places."""

    def saved(place: Place | None) -> Saved:
        if place is None:
            return Saved()
        (is_result, number), layout = place
        ref = TensorRef(record.node.name, number) if is_result else record.arguments[number].value
        return Saved(external=True) if ref is None else Saved(ref, layout)

    return tuple(map(saved, places))


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


class Span(NamedTuple):
    """Memory of the plain forward that no program has, from one of its calls to another."""

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

    records: list[Record] = field(default_factory=list)
    value_bytes: list[int] = field(default_factory=list)
    value_names: list[str] = field(default_factory=list)
    storages: dict[TensorRef, int] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    output_values: set[int] = field(default_factory=set)
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

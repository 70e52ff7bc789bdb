"""What each operation of a program does to memory: the program runs once, operation by operation, and is watched.

Which storages it reads, makes and writes, what autograd saves for its backward, whether it draws random numbers: all is
seen, not deduced. Storages are told apart by identity, writes by version counters, saved tensors by
``saved_tensors_hooks``. Values are freed after their last use, and nothing is kept for a backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ...operators.low_memory import LowMemory
from ...operators.registry import live_arguments, said_to_be_written
from ...operators.weights import Place, Weights
from ...process import counted
from ...program.opaque import OpaqueCall
from ...program.program import (
    Saved,
    TensorRef,
    args_of,
    get_attribute,
    has_history,
    run_nodes,
    storage_of,
    tensor_leaves,
    without_autocast,
)
from ...program.tensors import ByStorage, Layout, Start, anchor, contents, is_dense
from ...torch_state.compare import same_bits
from ...torch_state.dispatch import out_of_mode
from ...torch_state.private import next_node, number_of_node, storage_id, version_alone, version_of
from ...torch_state.settings import State, random_states, same_states
from ..forward.flat import gradient_targets, saving
from ..traced import Traced

T = TypeVar("T")


class Argument(NamedTuple):
    """A tensor argument of an operation."""

    ref: TensorRef
    value: TensorRef | None = None  # the same if an operation made its storage, not an external
    kind: tuple[Any, ...] = ()  # type, shape, strides, and whether it is dense


class Output(NamedTuple):
    """A result of an operation."""

    ref: TensorRef
    bytes: int
    differentiable: bool = True
    layout: Layout = Layout((), ())  # of its gradients, as is usual
    like: tuple[Layout, torch.dtype] = (Layout((), ()), torch.float32)  # what it is itself


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
    compared: int = 0  # by a recomputation of an opaque module with its first call


@dataclass(frozen=True)
class SeenVariant:
    """The low-memory variant of an operation, and what it saves in the operator's place."""

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
    random: bool = False
    variant: SeenVariant | None = None
    bindings: dict[Any, str] = field(default_factory=dict)  # see Program
    weights: Weights = field(default_factory=Weights)
    relaid: Callable[..., Weights | None] | None = None  # weighs its backward for gradients of other layouts
    nodes: range = range(0)  # of autograd's graph, by number
    is_reached: bool = True  # a backward from some output comes to it

    @property
    def in_place(self) -> bool:
        """Whether it writes what it was given."""
        return bool(self.externals.writes) or any(value in self.reads for value in self.writes)

    @property
    def aside(self) -> list[TensorRef]:
        """What of the program it holds without telling autograd."""
        target = self.node.target
        if not isinstance(target, OpaqueCall):
            return []
        given = (self.arguments[n].value for n in target.aside.given)
        return [*filter(None, given), *(TensorRef(self.node.name, n) for n in target.aside.made)]

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
        self.variant = None


def named_results(node: torch.fx.Node) -> list[int]:
    """The numbers of those results of an opaque module that the program has a name for and that are no views."""
    assert isinstance(node.target, OpaqueCall)
    if node.target.view is not None or not node.target.new:
        return []
    if len(node.target.new) == 1:
        return [0]
    return sorted({user.args[1] for user in node.users if user.target is operator.getitem})  # type: ignore[misc]


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
    if len(known) == 1 and known[0][0] is tensor:
        return known[0][1], None
    same = [(t, name) for t, name in known if t is tensor or _kind(t) == _kind(tensor)]
    for t, name in same:
        if layout_of(t) == layout_of(tensor):
            return name, None
    return (same[0][1], layout_of(tensor)) if same else None


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return storage_id(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def layout_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Its shape, strides and offset in entries."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def on_meta(leaf: Any) -> Any:
    """A tensor of its own, without content where it is strided; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with out_of_mode():
        made = Layout.of(leaf).zeros(leaf.dtype, "meta") if leaf.layout is torch.strided else leaf.detach()
        return made.requires_grad_(leaf.requires_grad) if leaf.is_leaf else Start.apply(anchor, made)[0]


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
    given: list[torch.Tensor] = field(default_factory=list)  # without content
    attributes: dict[str, Any] = field(default_factory=dict)  # what ``get_attr`` nodes stand for, without content
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


Visit = Callable[[Record, tuple[Any, ...], dict[str, Any]], None]
"""Called after each operation with its record and arguments."""


def observe(
    model: torch.nn.Module,
    traced: Traced,
    inputs: list[torch.Tensor],
    visit: Visit,
    like: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    around: AbstractContextManager[Any] | None = None,
) -> Observation:
    """Run a program with gradients on and record every operation; the model's buffers change as in one forward.

    Args:
        model, traced: the program and what it belongs to.
        inputs: of the run.
        visit: told of each operation.
        like: gives what the run takes in the place of a parameter, buffer or constant.
        around: entered, time and again, while an operation runs.
    """
    return _Observer(model, traced, visit, like, around or nullcontext()).run(inputs)


class _Observer:
    def __init__(
        self,
        model: torch.nn.Module,
        traced: Traced,
        visit: Visit,
        like: Callable[[torch.Tensor], torch.Tensor],
        around: AbstractContextManager[Any],
    ) -> None:
        self.model, self.traced, self.visit, self.like, self.around = model, traced, visit, like, around
        self.memory = _Memory()
        self.on_meta: dict[int, tuple[torch.Tensor, Any]] = {}  # and the tensors themselves, by their ids
        self.devices: set[torch.device] | None = None  # of the last operation, after which the states were these
        self.random: tuple[State, ...] = ()
        self.graph: list[Any] = []  # nodes for a backward, held until the outputs are gone

    def run(self, inputs: list[torch.Tensor]) -> Observation:
        nodes = counted(self.traced.graph.nodes, "weigh operation")
        with torch.enable_grad(), without_autocast():
            result = self.memory.result
            result.given = list(map(self._on_meta, inputs))
            result.inputs = frozenset(map(self.memory.external_number, inputs))
            outputs = run_nodes(nodes, inputs, self._attribute, self._call)
            result.outputs = [t.detach() for t in outputs]
            result.grad_targets, self.graph = gradient_targets(outputs, inputs)
            reached = set(map(number_of_node, self.graph))
            for record in result.records:
                record.is_reached = not record.nodes or not reached.isdisjoint(record.nodes)
            result.output_values = {n for n in map(self.memory.value, outputs) if n is not None}
        del outputs  # before this observer, which the caller may have let go of
        return result

    def _attribute(self, target: str) -> Any:
        found = get_attribute(self.model, self.traced.constants, target)
        self.memory.result.attributes[target] = self._on_meta(found)
        return self.memory.external(self.like(found)) if isinstance(found, torch.Tensor) else found

    def _on_meta(self, found: Any) -> Any:
        return self.on_meta.setdefault(id(found), (on_meta(found), found))[0]

    def _call(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        args, kwargs = args_of(node, values)
        record = Record(node)
        is_opaque = isinstance(node.target, OpaqueCall)
        refs, tensors = _tensor_arguments(node, values)
        versions = [version_of(tensor) for tensor in tensors]
        packed: list[torch.Tensor] = []
        devices = {t.device for t in tensors if t.is_cuda}
        random_before = self.random if devices == self.devices else random_states(devices)
        buffers = [(b, version_of(b)) for b in self.model.buffers()] if is_opaque else []
        held = set(map(id, args[2])) if is_opaque else set()
        own = {id(b): b.detach().clone() for b, _ in buffers if id(b) in held}
        first = next_node()
        with saving(packed), self.around:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        record.nodes = range(first, next_node())
        self.devices, self.random = devices, random_states(devices)
        is_seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        record.random = is_seeded or not same_states(random_before, self.random)
        said = set(map(id, said_to_be_written(node.target, args)))
        written = [t for t, v in zip(tensors, versions, strict=True) if version_of(t) != v or id(t) in said]
        if is_opaque:
            written += self._other_writes(buffers, own)
            packed[:] = [inner for tensor in packed for inner in contents(tensor) if storage_of(inner) is not None]
        self.memory.note_reads(record, refs, tensors)
        self.memory.note_outputs(record, result)
        self.memory.note_writes(record, written, args)
        self.memory.note_saves(record, packed, list(zip(tensors, refs, strict=True)), result)
        record.saved.compared = len(packed) if is_opaque else 0
        packed.clear()  # the autograd graph holds on to its hooks, and with them to this list
        self.memory.result.records.append(record)
        self.visit(record, args, kwargs)
        return result

    def _other_writes(self, before: list[tuple[torch.Tensor, int]], own: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Buffers that an opaque module wrote or replaced; ``own`` are copies of its own.

        Not all kernels count what they write.
        """
        now = {id(buffer) for buffer in self.model.buffers()}
        written = [
            b
            for b, version in before
            if version_of(b) != version or id(b) not in now or not same_bits(b, own.get(id(b), b))
        ]
        for buffer in written:
            if self.memory.value(buffer) is None:
                self.memory.external(buffer)
        return written


def _tensor_arguments(
    node: torch.fx.Node, values: dict[torch.fx.Node, Any]
) -> tuple[list[TensorRef], list[torch.Tensor]]:
    """The tensors that a node takes, and which program tensors they are."""
    used: list[torch.fx.Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), used.append)
    found = [(TensorRef(one.name, index), t) for one in used for index, t in enumerate(tensor_leaves(values[one]))]
    if node.target is operator.getitem:
        found = [found[cast(int, node.args[1])]]
    return [ref for ref, _ in found], [tensor for _, tensor in found]


class _Memory:
    """The storages of a program that runs, by identity: values, which it makes, and externals, each numbered from 0."""

    def __init__(self) -> None:
        self.values: ByStorage[int] = ByStorage()
        self.externals: dict[int, int] = {}
        self.saved: dict[int, list[tuple[Record, torch.Tensor, int]]] = {}  # by value: who saved it, at which version
        self.result = Observation()  # what was seen so far

    def external(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, now known to be an external."""
        self.externals.setdefault(storage_id(tensor), len(self.externals))
        return tensor

    def external_number(self, tensor: torch.Tensor) -> int:
        """The number of an external; a new one is that of a parameter which an opaque module moved."""
        return self.externals[storage_id(self.external(tensor))]

    def value(self, tensor: torch.Tensor) -> int | None:
        """The number of the value that a tensor is in, or None."""
        return self.values.get(tensor.untyped_storage())

    def note_reads(self, record: Record, refs: list[TensorRef], tensors: list[torch.Tensor]) -> None:
        for ref, tensor in zip(refs, tensors, strict=True):
            value = self.value(tensor)
            kind = tensor.dtype, tuple(tensor.shape), tensor.stride(), is_dense(tensor)
            record.arguments.append(Argument(ref, ref if value is not None else None, kind))
            if value is not None:
                _add(record.reads, value)
            else:
                _add(record.externals.reads, self.external_number(tensor))

    def note_outputs(self, record: Record, result: Any) -> None:
        for index, tensor in enumerate(tensor_leaves(result)):
            ref, storage = TensorRef(record.node.name, index), tensor.untyped_storage()
            if storage not in self.values and storage_id(tensor) not in self.externals:
                name = record.node.name if index == 0 else f"{record.node.name}.{index}"
                self.values[storage] = self.result.new_value(name, storage.nbytes())
                record.writes.append(self.values[storage])
            known = self.value(tensor)
            if known is not None:
                self.result.storages[ref] = known
            size = tensor.numel() * tensor.element_size()
            like = Layout.of(tensor), tensor.dtype
            record.outputs.append(Output(ref, size, has_history(tensor), Layout.usual(tensor), like))

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
                _add(record.externals.writes, self.external_number(tensor))
        for key in harmless:
            number = self.externals.get(key)
            if number in record.externals.reads:
                record.externals.reads.remove(number)

    def _note_overwritten(self, record: Record, value: int) -> None:
        """Versions tell which of a value's tensors were written: parts that are no views of it have their own."""
        self.result.overwritten += [
            Overwritten(value, saver, record)
            for saver, tensor, version in self.saved.get(value, [])
            if version_of(tensor) != version
        ]

    def note_saves(
        self, record: Record, packed: list[torch.Tensor], known: list[tuple[torch.Tensor, TensorRef]], result: Any
    ) -> None:
        known = [(t, TensorRef(record.node.name, n)) for n, t in enumerate(tensor_leaves(result))] + known
        saves, internal = record.saved, set[int]()
        for tensor in packed:
            value, key = self.value(tensor), storage_id(tensor)
            is_external = value is None and key in self.externals
            found = None if is_external else alike(tensor, known)
            saves.tensors.append(Saved(external=is_external) if found is None else Saved(*found))
            if found is not None and value is not None:
                _add(saves.values, value)
                if (alone := version_alone(tensor)) is not None:
                    self.saved.setdefault(value, []).append((record, alone, version_of(tensor)))
            elif not is_external and key not in internal:
                internal.add(key)
                saves.internal_bytes += tensor.untyped_storage().nbytes()
        if isinstance(record.node.target, OpaqueCall):
            # One slot for each argument and result that it saves in whatever way; the rest stays with it.
            refs = [argument.value for argument in reversed(record.arguments) if argument.value is not None]
            made = [TensorRef(record.node.name, n) for n in named_results(record.node)]
            given, own = ({self.result.storages.get(ref): Saved(ref) for ref in each} for each in (refs, made))
            saves.tensors = [given[value] for value in saves.values if value in given]
            saves.tensors += [own[value] for value in saves.values if value in own and value not in given]


def _add(numbers: list[int], number: int) -> None:
    if number not in numbers:
        numbers.append(number)

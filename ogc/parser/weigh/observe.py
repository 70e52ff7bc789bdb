"""Runs a recorded program once, operation by operation, and writes down what each one does to memory.

Which storages it reads, makes and changes, which tensors autograd saves for its backward, whether it
draws random numbers. All of it is seen, not deduced: storages are told apart by identity, writes by
version counters, saved tensors by ``saved_tensors_hooks``. Values are freed after their last use and
nothing is kept for a backward, so that memory is that of inference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from tqdm import tqdm

from ...operators.registry import live_arguments
from ...program.leaf import Leaf
from ...program.program import (
    Saved,
    TensorRef,
    attribute,
    has_history,
    storage_of,
    tensor_leaves,
    without_autocast,
)
from ...torch_state.private import base_of, id_of_storage, storage_id, version_of
from ...torch_state.random_state import State, random_states, same_states
from ..passes.reached import reached
from ..traced import Traced
from .gradients import Rebase

Visit = Callable[[torch.fx.Node, tuple[Any, ...], dict[str, Any], "Record"], None]


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

    @property
    def in_place(self) -> bool:
        """Whether it writes what it was given."""
        return bool(self.writes_external) or any(value in self.reads for value in self.writes)


@dataclass
class Observation:
    """One record per operation, and what the program made."""

    records: list[Record]
    value_bytes: list[int]
    value_names: list[str]
    storages: dict[TensorRef, int]
    outputs: list[torch.Tensor]
    output_values: set[int]
    rebased: dict[TensorRef, TensorRef] = field(default_factory=dict)  # see Rebase: what stands for a tensor at the end
    reached: frozenset[Any] = frozenset()


def observe(
    model: torch.nn.Module, traced: Traced, inputs: list[torch.Tensor], visit: Visit | None = None
) -> Observation:
    """Run ``traced`` on ``inputs`` with gradients on and record every operation.

    Args:
        model: where the program's parameters and buffers live; buffers change as in one forward.
        traced: the program.
        inputs: tensors for its placeholders.
        visit: called after each operation with its node, arguments and record, for a profiler.
    """
    return _Observer(model, traced, inputs, visit).run()


class _Observer:
    def __init__(self, model: torch.nn.Module, traced: Traced, inputs: list[torch.Tensor], visit: Visit | None) -> None:
        self.model = model
        self.traced = traced
        self.visit = visit
        self.inputs = inputs
        self.given = iter(inputs)
        self.found: dict[str, Any] = {}
        self.storages = _Storages()
        self.views: dict[int, list[TensorRef]] = {}  # program tensors, by their values
        self.devices: set[torch.device] | None = None  # of the last operation, after which the states were these
        self.random: tuple[State, ...] = ()
        self.graph: list[Any] = []  # nodes for a backward, held until the outputs are gone
        self.result = Observation([], [], [], {}, [], set())

    def run(self) -> Observation:
        last_use = self._last_uses()
        with torch.enable_grad(), without_autocast():
            for node in tqdm(self.traced.graph.nodes, "weigh operations", delay=1, leave=False):
                self._run(node)
                for name in last_use.get(node.name, ()):
                    del self.found[name]
        return self.result

    def _run(self, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            self._external(node, next(self.given))
        elif node.op == "get_attr":
            self._external(node, get_attribute(self.model, self.traced.constants, str(node.target)))
        elif node.op == "output":
            outputs = self._arguments(node.args[0])
            self.result.outputs = [t.detach() for t in outputs]
            self.result.reached, self.graph = reached(outputs, self.inputs)
            numbers = {self.storages.value(t) for t in outputs}
            self.result.output_values = {n for n in numbers if n is not None}
        else:
            args, kwargs = self._arguments(node.args), self._arguments(node.kwargs)
            self.found[node.name] = self._call(node, args, kwargs)

    def _external(self, node: torch.fx.Node, found: Any) -> None:
        if isinstance(found, torch.Tensor):  # and not the module of a leaf
            self.storages.add_external(found)
        self.found[node.name] = found

    def _arguments(self, arguments: Any) -> Any:
        return torch.fx.node.map_arg(arguments, lambda node: self.found[node.name])

    def _call(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        record = Record(node)
        is_leaf = isinstance(node.target, Leaf)
        refs, tensors = self._tensor_arguments(node)
        versions = [version_of(tensor) for tensor in tensors]
        histories = [None if base_of(tensor) is None else base_of(tensor).grad_fn for tensor in tensors]
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> int:
            packed.append(tensor)
            return len(packed) - 1

        devices = {t.device for t in tensors if t.is_cuda}
        random_before = self.random if devices == self.devices else random_states(devices)
        buffers = [(buffer, version_of(buffer)) for buffer in self.model.buffers()] if is_leaf else []
        with saved_tensors_hooks(pack, packed.__getitem__):
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        self.devices, self.random = devices, random_states(devices)
        record.random = _is_seeded(node) or not same_states(random_before, self.random)
        written = [t for t, version in zip(tensors, versions, strict=True) if version_of(t) != version]
        if is_leaf:
            written += self._other_writes(buffers)
            packed[:] = [tensor for tensor in packed if storage_of(tensor) is not None]
        self._record_reads(record, refs, tensors)
        self._record_outputs(record, result)
        self._record_writes(record, written, args)
        self._record_rebase(record, tensors, histories)
        self._record_saves(record, packed, list(zip(tensors, refs, strict=True)), result)
        if is_leaf:
            # One slot for each argument that it saves in whatever way; the rest stays with it.
            given = {self.result.storages[ref]: Saved(ref) for ref in reversed(record.arguments) if ref is not None}
            record.saves = [given[value] for value in record.saved_values if value in given]
        packed.clear()  # the autograd graph holds on to its hooks, and with them to this list
        self.result.records.append(record)
        if self.visit is not None:
            self.visit(node, args, kwargs, record)
        return result

    def _other_writes(self, before: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """Buffers that a leaf wrote or gave up for others, be they its own or not."""
        now = {id(buffer) for buffer in self.model.buffers()}
        written = [b for b, version in before if version_of(b) != version or id(b) not in now]
        for buffer in written:
            if self.storages.value(buffer) is None:
                self.storages.add_external(buffer)
        return written

    def _tensor_arguments(self, node: torch.fx.Node) -> tuple[list[TensorRef], list[torch.Tensor]]:
        """The tensors that a node takes, and which program tensors they are."""
        leaves: list[torch.fx.Node] = []
        torch.fx.node.map_arg((node.args, node.kwargs), leaves.append)
        found = [
            (TensorRef(leaf.name, index), tensor)
            for leaf in leaves
            for index, tensor in enumerate(tensor_leaves(self.found[leaf.name]))
        ]
        if node.target is operator.getitem:
            found = [found[cast(int, node.args[1])]]
        return [ref for ref, _ in found], [tensor for _, tensor in found]

    def _record_reads(self, record: Record, refs: list[TensorRef], tensors: list[torch.Tensor]) -> None:
        for ref, tensor in zip(refs, tensors, strict=True):
            value = self.storages.value(tensor)
            record.arguments.append(ref if value is not None else None)
            record.receivers.append(self.result.rebased.get(ref, ref) if value is not None else None)
            record.sources.append(ref)
            record.layouts.append((tensor.dtype, tuple(tensor.shape), tensor.stride(), is_dense(tensor)))
            if value is not None:
                _add(record.reads, value)
            else:
                _add(record.reads_external, self.storages.external(tensor))

    def _record_outputs(self, record: Record, result: Any) -> None:
        for index, tensor in enumerate(tensor_leaves(result)):
            ref = TensorRef(record.node.name, index)
            if not self.storages.knows(tensor):
                number = self.storages.add_value(tensor)
                self.result.value_bytes.append(tensor.untyped_storage().nbytes())
                self.result.value_names.append(record.node.name if index == 0 else f"{record.node.name}.{index}")
                record.writes.append(number)
            known = self.storages.value(tensor)
            if known is not None:
                self.result.storages[ref] = known
                self.views.setdefault(known, []).append(ref)
            record.outputs.append(ref)
            record.output_bytes.append(tensor.numel() * tensor.element_size())
            record.differentiable.append(has_history(tensor))

    def _record_writes(self, record: Record, written: list[torch.Tensor], args: Any) -> None:
        harmless = {
            storage_id(live) for live in live_arguments(record.node.target, args) if isinstance(live, torch.Tensor)
        }
        for tensor in written:
            value = self.storages.value(tensor)
            if value is not None:
                _add(record.writes, value)
            elif storage_id(tensor) not in harmless:
                _add(record.writes_external, self.storages.external(tensor))
        for key in harmless:
            number = self.storages.number(key)
            if number in record.reads_external:
                record.reads_external.remove(number)

    def _record_rebase(self, record: Record, tensors: list[torch.Tensor], histories: list[Any]) -> None:
        """What was read before the write to a view stands for the whole tensor as it is after it from here on."""
        for argument, (tensor, history) in enumerate(zip(tensors, histories, strict=True)):
            base, value = base_of(tensor), self.storages.value(tensor)
            if base is None or value is None or type(base.grad_fn).__name__ != "CopySlices" or base.grad_fn is history:
                continue
            known = [ref for ref in self.views[value] if ref not in record.outputs]
            before, after = known[0], TensorRef(record.node.name, len(record.outputs))
            size = base.numel() * base.element_size()
            record.rebase = Rebase(argument, self.result.rebased.get(before, before), after, size)
            self.result.rebased.update(dict.fromkeys(known, after))
            return

    def _record_saves(
        self, record: Record, packed: list[torch.Tensor], known: list[tuple[torch.Tensor, TensorRef]], result: Any
    ) -> None:
        known = [(t, TensorRef(record.node.name, n)) for n, t in enumerate(tensor_leaves(result))] + known
        internal: set[int] = set()
        for tensor in packed:
            saved = self._saved(tensor, known)
            record.saves.append(saved)
            value = self.storages.value(tensor)
            key = storage_id(tensor)
            if saved.tensor is not None and value is not None:
                _add(record.saved_values, value)
            elif not saved.external and key not in internal:
                internal.add(key)
                record.internal_bytes += tensor.untyped_storage().nbytes()

    def _saved(self, tensor: torch.Tensor, known: list[tuple[torch.Tensor, TensorRef]]) -> Saved:
        if self.storages.knows(tensor) and self.storages.value(tensor) is None:
            return Saved(external=True)
        same = [(t, ref) for t, ref in known if _same_kind(t, tensor)]
        for candidate, ref in same:
            if _layout(candidate) == _layout(tensor):
                return Saved(ref)
        if same:
            return Saved(same[0][1], _layout(tensor))
        return Saved()

    def _last_uses(self) -> dict[str, list[str]]:
        last: dict[str, str] = {}
        for node in self.traced.graph.nodes:
            last[node.name] = node.name
            for used in node.all_input_nodes:
                last[used.name] = node.name
        frees: dict[str, list[str]] = {}
        for name, user in last.items():
            frees.setdefault(user, []).append(name)
        return {user: [n for n in names if n != "output"] for user, names in frees.items()}


class _Storages:
    """Numbers storages by identity: values (made by the program) from 0, externals from 0 of their own."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[int, StorageWeakRef]] = {}
        self.externals: dict[int, int] = {}
        self.count = 0

    def add_external(self, tensor: torch.Tensor) -> None:
        self.externals.setdefault(storage_id(tensor), len(self.externals))

    def add_value(self, tensor: torch.Tensor) -> int:
        # The weak reference keeps the address from being reused while the entry stands.
        storage = tensor.untyped_storage()
        self.values[id_of_storage(storage)] = (self.count, StorageWeakRef(storage))
        self.count += 1
        return self.count - 1

    def knows(self, tensor: torch.Tensor) -> bool:
        return self.value(tensor) is not None or storage_id(tensor) in self.externals

    def value(self, tensor: torch.Tensor) -> int | None:
        entry = self.values.get(storage_id(tensor))
        return entry[0] if entry is not None and not entry[1].expired() else None

    def external(self, tensor: torch.Tensor) -> int:
        self.add_external(tensor)  # a leaf may have given a parameter another storage
        return self.externals[storage_id(tensor)]

    def number(self, key: int) -> int | None:
        return self.externals.get(key)


def get_attribute(model: torch.nn.Module, constants: dict[str, torch.Tensor], target: str) -> Any:
    """The tensor, or the module of a leaf, that a ``get_attr`` node stands for."""
    return constants[target] if target in constants else attribute(model, target)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers a block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        storage_id(a) == storage_id(b)
        and a.dtype == b.dtype
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _is_seeded(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _add(numbers: list[int], number: int) -> None:
    if number not in numbers:
        numbers.append(number)


def state_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """What a forward may change: buffers and the random state."""
    return [*(b.clone() for b in model.buffers()), torch.get_rng_state()]

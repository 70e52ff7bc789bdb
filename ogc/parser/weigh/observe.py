"""Runs a recorded program once, operation by operation, and writes down what each one does to memory.

Which storages it reads, makes and changes, which tensors autograd saves for its backward, whether it
draws random numbers. All of it is seen, not deduced: storages are told apart by identity, writes by
version counters, saved tensors by ``saved_tensors_hooks``. Values are freed after their last use and
nothing is kept for a backward, so that memory is that of inference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from ...during_step import progress
from ...operators.registry import said_to_be_written
from ...program.leaf import Leaf
from ...program.program import TensorRef, args_of, get_attribute, run_nodes, storage_of, tensor_leaves, without_autocast
from ...program.tensors import contents
from ...torch_state.compare import same_bits
from ...torch_state.private import base_of, version_of
from ...torch_state.settings import State, random_states, same_states
from ..forward.flat import gradient_targets, saving
from ..traced import Traced
from .record import Memory, Observation, Record

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
    return _Observer(model, traced, inputs, visit, like, around or nullcontext()).run()


class _Observer:
    def __init__(
        self,
        model: torch.nn.Module,
        traced: Traced,
        inputs: list[torch.Tensor],
        visit: Visit,
        like: Callable[[torch.Tensor], torch.Tensor],
        around: AbstractContextManager[Any],
    ) -> None:
        self.model = model
        self.like, self.around = like, around
        self.traced = traced
        self.visit = visit
        self.inputs = inputs
        self.memory = Memory()
        self.devices: set[torch.device] | None = None  # of the last operation, after which the states were these
        self.random: tuple[State, ...] = ()
        self.graph: list[Any] = []  # nodes for a backward, held until the outputs are gone

    def run(self) -> Observation:
        nodes = progress(self.traced.graph.nodes, desc="weigh operations")
        with torch.enable_grad(), without_autocast():
            result = self.memory.result
            result.inputs = frozenset(map(self.memory.external_number, self.inputs))
            outputs = run_nodes(nodes, self.inputs, self._attribute, self._call)
            result.outputs = [t.detach() for t in outputs]
            result.grad_targets, self.graph = gradient_targets(outputs, self.inputs)
            result.output_values = {n for n in map(self.memory.value, outputs) if n is not None}
        del outputs  # before this observer, which the caller may have let go of
        return result

    def _attribute(self, target: str) -> Any:
        found = get_attribute(self.model, self.traced.constants, target)
        return self.memory.external(self.like(found) if isinstance(found, torch.Tensor) else found)

    def _call(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        args, kwargs = args_of(node, values)
        record = Record(node)
        is_leaf = isinstance(node.target, Leaf)
        refs, tensors = _tensor_arguments(node, values)
        versions = [version_of(tensor) for tensor in tensors]
        histories = [None if base_of(tensor) is None else base_of(tensor).grad_fn for tensor in tensors]
        packed: list[torch.Tensor] = []
        devices = {t.device for t in tensors if t.is_cuda}
        random_before = self.random if devices == self.devices else random_states(devices)
        buffers = [(b, version_of(b)) for b in self.model.buffers()] if is_leaf else []
        held = set(map(id, args[2])) if is_leaf else set()
        own = {id(b): b.detach().clone() for b, _ in buffers if id(b) in held}
        with saving(packed), self.around:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        self.devices, self.random = devices, random_states(devices)
        record.random = _is_seeded(node) or not same_states(random_before, self.random)
        said = set(map(id, said_to_be_written(node.target, args)))
        written = [t for t, v in zip(tensors, versions, strict=True) if version_of(t) != v or id(t) in said]
        if is_leaf:
            written += self._other_writes(buffers, own)
            packed[:] = [inner for tensor in packed for inner in contents(tensor) if storage_of(inner) is not None]
        self.memory.note_reads(record, refs, tensors)
        self.memory.note_outputs(record, result)
        self.memory.note_writes(record, written, args)
        self.memory.note_rebase(record, tensors, histories)
        self.memory.note_saves(record, packed, list(zip(tensors, refs, strict=True)), result)
        packed.clear()  # the autograd graph holds on to its hooks, and with them to this list
        self.memory.result.records.append(record)
        self.visit(record, args, kwargs)
        return result

    def _other_writes(self, before: list[tuple[torch.Tensor, int]], own: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Buffers that a leaf wrote or gave up for others, be they its own or not; ``own`` are copies of its own.

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


def _is_seeded(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())

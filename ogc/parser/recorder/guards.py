"""Guards for what Python read out of tensors, where inputs and buffers alone decide on it; else reasons for leaves.

The values that were read are computed anew at the start of each call by a small program of their own, and the
recorded program holds where they are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, dropwhile
from posixpath import commonpath
from typing import Any

import torch

from ...program.leaf import Leaf
from ...program.program import CONSTANT, Guards, operator_name, shapes_of
from ..traced import OpaqueError
from .operators import PACKED
from .recorder import Read, Recorder

aten = torch.ops.aten

_COUNTS = {"index", "masked_select", "nonzero", "nonzero_numpy", "argwhere"}
"""Operators whose result has as many entries as there are true ones in those that decide."""


def guards_of(recorder: Recorder, outputs: Sequence[torch.fx.Node]) -> Guards | None:
    """The guards of a recorded forward; None if Python read nothing.

    Raises:
        OpaqueError: something was read that depends on activations, parameters or random numbers; the error names the
            modules that hide it.
    """
    slices = [_Slice(recorder, read) for read in recorder.reads]
    _refuse(recorder, [s for s in slices if s.obstacle], outputs)
    if not slices:
        return None
    nodes = set().union(*(one.nodes for one in slices))
    reads = [one.read for one in slices]
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    values: list[torch.fx.Node] = []
    for node in recorder.graph.nodes:
        if node in nodes or node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
        values += [_value(graph, copies, read) for read in reads if read.last is node]
    graph.output(tuple(values))
    names = [str(node.target) for node in graph.find_nodes(op="get_attr")]
    constants = {name: recorder.tensors.constants[name] for name in names if name.startswith(CONSTANT)}
    return Guards(graph, constants, (), tuple(read.what for read in reads))


def _value(graph: torch.fx.Graph, copies: dict[torch.fx.Node, torch.fx.Node], read: Read) -> torch.fx.Node:
    """The node of the guards' program that gives what was read: a number, a tensor or shapes."""
    if not read.deciding:
        node = copies[read.node]
        return node if read.is_number else graph.call_function(aten.clone.default, (node,))
    decisive = [copies[node] for node in read.deciding]
    called: Any = read.node.target
    name = operator_name(called) if called.namespace == "aten" else ""
    if name in _COUNTS:
        counts = [graph.call_function(aten.count_nonzero.default, (node,)) for node in decisive]
        return counts[0] if len(counts) == 1 else graph.call_function(aten.stack.default, (counts,))
    if name == "repeat_interleave":
        return graph.call_function(aten.sum.default, (decisive[0],))
    if name in PACKED or not copies.keys() >= {*read.node.all_input_nodes}:
        return graph.call_function(aten.clone.default, (decisive[0],))
    args, kwargs = torch.fx.node.map_arg((read.node.args, read.node.kwargs), copies.__getitem__)
    given: Any = (called, args, dict(kwargs))
    return graph.call_function(shapes_of, given)


def _lengths(node: torch.fx.Node) -> torch.fx.Node:
    """The node of the lengths that a sequence was packed by, which decide on the sizes of its batches."""
    packed = node.args[0] if node.target is operator.getitem else None
    is_packed = isinstance(packed, torch.fx.Node) and packed.target is aten._pack_padded_sequence.default
    return packed.args[1] if is_packed else node  # type: ignore[union-attr, return-value]


class _Slice:
    """The calls that decide on what was read, and what stands in the way of making them by themselves, if anything."""

    def __init__(self, recorder: Recorder, read: Read) -> None:
        self.read = read = read._replace(deciding=tuple(map(_lengths, read.deciding)))
        self.recorder = recorder
        self.nodes: set[torch.fx.Node] = {*(read.deciding or (read.node,))}
        self.storages: set[int] = set()
        for node in dropwhile(lambda node: node is not read.last, reversed(recorder.graph.nodes)):
            self._include(node)
        is_run = read.deciding and operator_name(read.node.target) not in PACKED
        runs = self.nodes | ({read.node} if is_run else set())
        included = (node for node in recorder.graph.nodes if node in runs)
        self.obstacle = next(filter(None, map(self._why_not, included)), "")

    def _include(self, node: torch.fx.Node) -> None:
        touched = self.recorder.touched.get(node)
        if node in self.nodes or (touched is not None and not touched.written.isdisjoint(self.storages)):
            self.nodes.add(node)
            self.nodes.update(node.all_input_nodes)
            if touched is not None:
                self.storages |= touched.given | touched.written

    def _why_not(self, node: torch.fx.Node) -> str:
        tensors = self.recorder.tensors
        if node.op == "placeholder":
            return ""
        if node.op == "get_attr":
            tensor = tensors.state.get(str(node.target))
            if isinstance(tensor, torch.nn.Parameter):
                return "parameters"
            return "a buffer that the forward changes" if self._is_written(tensor) else ""
        if isinstance(node.target, Leaf):
            return "what a leaf computes"
        touched = self.recorder.touched.get(node)
        if touched is not None and not touched.written.isdisjoint(tensors.external_numbers):
            return "what is written to inputs or buffers"
        return "random numbers" if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) else ""

    def _is_written(self, tensor: torch.Tensor | None) -> bool:
        storage = None if tensor is None else self.recorder.tensors.storage(tensor)
        return storage is not None and any(storage.number in t.written for t in self.recorder.touched.values())


def _refuse(recorder: Recorder, slices: Sequence[_Slice], outputs: Sequence[torch.fx.Node]) -> None:
    shapes = [one for one in slices if one.read.deciding]
    if shapes:
        first = shapes[0].read
        message = (
            f"{first.what}, cannot be replayed operation by operation (module '{first.module}'), as it depends on "
            f"{shapes[0].obstacle}; use masks in its stead, put it into a submodule that returns tensors of fixed "
            "shapes, or optimize the submodules around it instead"
        )
        raise OpaqueError(
            message, {_around(_spread(recorder, one.read.node, outputs)): one.read.what for one in shapes}
        )
    if slices:
        reasons = "; ".join(dict.fromkeys(f"{one.read.what}, which depends on {one.obstacle}" for one in slices))
        raise OpaqueError(
            f"the forward reads numbers out of tensors: {reasons}. What it "
            "computes then depends on the data, and a plan for the sample input would be wrong for other "
            "data. Replace the branch or loop by tensor operations (torch.where, masks), put it into a "
            "submodule of its own, optimize the submodules around it instead, or write down what is computed "
            "with parse_graph=.",
            {one.read.module: one.read.what for one in reversed(slices)},
        )


_LIKE_FIRST_INPUT = {
    "copy", "index_add", "index_copy", "index_put", "put", "scatter", "scatter_add", "scatter_reduce", "masked_scatter",
    "select_scatter", "slice_scatter",
}  # fmt: skip


def _spread(recorder: Recorder, source: torch.fx.Node, outputs: Sequence[torch.fx.Node]) -> list[str]:
    """The modules that use tensors whose shape depends on that of one call's result."""
    shapes = {source, *(user for user in source.users if user.target is operator.getitem)}
    modules = [str(source.meta["module"])]
    for node in dropwhile(lambda node: node is not source, recorder.graph.nodes):
        if shapes.isdisjoint(node.all_input_nodes) or node.op != "call_function":
            continue
        modules.append(str(node.meta.get("module", "")))
        name = operator_name(node.target)
        like_first = name.endswith("_") or name in _LIKE_FIRST_INPUT
        if node.meta.get("dims", 1) and (node.all_input_nodes[0] in shapes or not like_first):
            shapes.add(node)
    sizes = chain.from_iterable(recorder.sizes_read.get(node, ()) for node in shapes)
    return [*modules, *sizes, *("" for node in outputs if node in shapes)]


def _around(modules: Sequence[str]) -> str:
    """The innermost module that holds all of these."""
    return commonpath([name.replace(".", "/") for name in modules]).replace("/", ".")

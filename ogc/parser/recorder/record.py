"""Runs a model once and writes down what it computes, with guards for what Python read out of tensors.

A small program of its own computes anew, at the start of each call, what was read; the recorded program holds where
that is the same. Inputs and buffers alone must decide on it, or the modules that hide it become opaque.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, dropwhile
from posixpath import commonpath
from typing import Any

import torch

from ...errors import OgcError, ParseError
from ...program.autocast import shares_casts
from ...program.opaque import OpaqueCall
from ...program.program import CONSTANT, OWN, Guards, call_beside, operator_name, shapes_of, storage_of
from ...program.structures import TensorSpec
from ...torch_state.dispatch import dispatched_to
from ...torch_state.no_trace import unwatched, writing
from ...torch_state.private import id_of_storage
from ...torch_state.ranks import told_of_collectives
from ..arguments import Sample
from ..forward.flat import FlatForward, nothing_saved
from ..forward.location import scopes_in_use
from ..traced import BYTES, HISTORY, OpaqueError, RecordAgain, Traced, used
from .operators import PACKED
from .python_calls import python_watched
from .recorder import Read, Recorder


def record(sample: Sample, forward: Callable[..., Any], opaque: set[str], is_careful: bool) -> Traced:
    """A :class:`~ogc.parser.traced.FrontEnd`; careful by a look at the random states of Python before each call."""
    model, spec, tensors = sample
    recorder = Recorder(model, tensors, opaque)
    recorder.shares_casts = shares_casts(spec)
    flat = FlatForward(forward, spec)
    parameters, buffers = dict(model.named_parameters()), buffers_of(model)
    try:
        outputs, has_draws = _run(recorder, flat, tensors, is_careful)
    finally:
        if recorder.restore():
            writing.add(model)
    if not recorder.is_valid or (has_draws and not is_careful):
        raise RecordAgain(is_careful or has_draws)
    nodes = [recorder.tensors.node(tensor) for tensor in outputs]
    recorder.tensors.note_ends()
    recorder.raise_if_leaky()
    _refuse_new_parameters(model, parameters)
    refuse_new_buffers(model, buffers, opaque)
    guards = guards_of(recorder, nodes)
    recorder.raise_if_opaque()
    _refuse_shared_casts(recorder.graph)
    _give_each_call_its_own(recorder)
    recorder.graph.output(tuple(nodes))
    recorder.graph.lint()
    for node in used(recorder.graph):  # which is observed where it runs as a program
        node.meta.pop(BYTES, None)
        node.meta.pop(HISTORY, None)
    assert flat.output_spec is not None
    graph, constants = recorder.graph, recorder.tensors.constants
    del outputs  # before the nodes that ``flat`` holds
    return Traced(graph, constants, flat.output_spec, flat.outputs, flat.requires_grad, flat.grad_targets, guards)


def _run(
    recorder: Recorder, flat: FlatForward, tensors: list[torch.Tensor], is_careful: bool
) -> tuple[list[torch.Tensor], bool]:
    """The outputs of the recorded forward, and whether it drew random numbers past torch."""
    with (
        nothing_saved(recorder.saved.append, where=lambda: recorder.scopes.current),
        python_watched(recorder) as calls,
        scopes_in_use(recorder.scopes),
        dispatched_to(recorder),
        told_of_collectives(recorder.note_collective),
    ):
        recorder.before_call = calls.look_for_draws if is_careful else None
        try:
            outputs = flat(*tensors)
        except Exception as error:
            recorder.raise_if_leaky()  # which may be what it is about
            if isinstance(error, OgcError):
                raise
            failed = calls.failed or recorder.scopes.failed
            if failed in recorder.opaque_names and recorder.model.get_submodule(failed) not in unwatched:
                unwatched.add(recorder.model.get_submodule(failed))
                raise RecordAgain(is_careful) from error
            unwatched.add(recorder.model.get_submodule(failed))
            what = _failure(error)
            raise OpaqueError(f"the forward {what}", {failed: what}) from error
        calls.look_for_draws()
    flat.finish(outputs, tensors)
    return outputs, calls.has_draws


def _failure(error: Exception) -> str:
    """What a module does that fails where its operators are seen, and nowhere else."""
    text = str(error).partition("\n")[0]
    if "INTERNAL ASSERT" in text or "Tensor subclass" in text:  # PyTorch's words for it
        return "computes with tensors of a class that has operators of its own (quantized, nested, an attention bias)"
    return f"fails while it is recorded: {text}"


def _refuse_shared_casts(graph: torch.fx.Graph) -> None:
    """Autocast may cast a parameter once for several uses; an opaque module would do it for itself."""
    for node in graph.nodes:
        opaque = node.target
        if isinstance(opaque, OpaqueCall) and opaque.autocast and any(len(held.users) > 1 for held in node.args[2]):
            why = "shares a parameter with other calls under autocast"
            raise OpaqueError(f"the opaque module {opaque.module} {why}; cast it outside", {opaque.module: why})


def _give_each_call_its_own(recorder: Recorder) -> None:
    """Constants that the forward makes anew and writes later are copied first."""
    for node in recorder.tensors.rewritten:
        with recorder.graph.inserting_after(node):
            copy = call_beside(node, torch.ops.aten.clone.default, node)
            copy.meta[OWN] = True
        for user in [user for user in node.users if user is not copy]:
            user.replace_input_with(node, copy)


def _refuse_new_parameters(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    after = dict(model.named_parameters())
    for name in [*before, *after]:
        if name not in after:
            raise ParseError(f"the forward takes the parameter {name} out of the model; make it keep its parameters")
        if after[name] is not before.get(name):
            raise ParseError(
                f"the forward makes the parameter {name}; make it in __init__, or call the model once before it is "
                "optimized if it is made in the first call alone"
            )


def buffers_of(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, TensorSpec, int]]:
    """Each buffer, by name, with what it is like and where its memory is."""
    found = {name: (buffer, storage_of(buffer)) for name, buffer in model.named_buffers()}
    return {n: (b, TensorSpec.of(b), 0 if raw is None else id_of_storage(raw)) for n, (b, raw) in found.items()}


def refuse_new_buffers(
    model: torch.nn.Module, before: Mapping[str, tuple[torch.Tensor, TensorSpec, int]], opaque: Collection[str]
) -> None:
    """Raise OpaqueError if the forward gave the model another buffer, or one of its buffers other memory or sizes."""
    for name, (buffer, *memory) in buffers_of(model).items():
        known, *was = before.get(name, (None, None))
        if (known is buffer and memory == was) or any(name.startswith(f"{one}.") for one in opaque):
            continue
        does = "resizes the buffer" if known is buffer else "assigns a new tensor to the buffer"
        raise OpaqueError(
            f"the forward {does} {name}, which a replay would not repeat; update it in place (copy_, add_, mul_) "
            "instead, or call the model before it is optimized if its first call alone does so",
            {name.rpartition(".")[0]: "resizes buffers" if known is buffer else "assigns new tensors to buffers"},
        )


aten = torch.ops.aten


# -- guards ----------------------------------------------------------------------------------------------


_COUNTS = {"index", "masked_select", "nonzero", "nonzero_numpy", "argwhere"}
"""Operators whose result has as many entries as there are true ones in those that decide."""


def guards_of(recorder: Recorder, outputs: Sequence[torch.fx.Node]) -> Guards | None:
    """The guards of a recorded forward; None if Python read nothing.

    OpaqueError names the modules that hide reads of what depends on activations, parameters or random numbers.
    """
    chunks = [_Chunk(recorder, read) for read in recorder.reads]
    _refuse(recorder, [s for s in chunks if s.obstacle], outputs)
    if not chunks:
        return None
    nodes = set().union(*(one.nodes for one in chunks))
    reads = [one.read for one in chunks]
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


class _Chunk:
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
            storage = None if tensor is None else tensors.storage(tensor)
            is_written = storage and any(storage.number in t.written for t in self.recorder.touched.values())
            return "a buffer that the forward changes" if is_written else ""
        if isinstance(node.target, OpaqueCall):
            return "what an opaque module computes"
        touched = self.recorder.touched.get(node)
        if touched is not None and not touched.written.isdisjoint(tensors.external_numbers):
            return "what is written to inputs or buffers"
        return "random numbers" if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) else ""


def _refuse(recorder: Recorder, chunks: Sequence[_Chunk], outputs: Sequence[torch.fx.Node]) -> None:
    shapes = [one for one in chunks if one.read.deciding]
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
    if chunks:
        reasons = "; ".join(dict.fromkeys(f"{one.read.what}, which depends on {one.obstacle}" for one in chunks))
        raise OpaqueError(
            f"the forward reads numbers out of tensors: {reasons}. What it "
            "computes then depends on the data, and a plan for the sample input would be wrong for other "
            "data. Replace the branch or loop by tensor operations (torch.where, masks), put it into a "
            "submodule of its own, optimize the submodules around it instead, or write down what is computed "
            "with parse_graph=.",
            {one.read.module: one.read.what for one in reversed(chunks)},
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

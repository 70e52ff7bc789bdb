"""Runs a model once and writes down what it computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ...errors import OgcError, ParseError
from ...program.casts import shares_casts
from ...program.leaf import Leaf
from ...program.program import OWN, call_beside, storage_of
from ...program.structures import TensorSpec
from ...torch_state.dispatch import dispatched_to
from ...torch_state.no_trace import unwatched, writing
from ...torch_state.private import id_of_storage
from ...torch_state.ranks.collectives import told_of_collectives
from ..arguments import Sample
from ..forward.flat import FlatForward, nothing_saved
from ..forward.location import scopes_in_use
from ..traced import BYTES, HISTORY, OpaqueError, RecordAgain, Traced, used
from .guards import guards_of
from .python_calls import python_watched
from .recorder import Recorder


def record(sample: Sample, forward: Callable[..., Any], leaves: set[str], is_careful: bool) -> Traced:
    """A :class:`~ogc.parser.traced.FrontEnd`.

    It is careful by a look at the random states of Python and numpy before each call, which takes time.
    """
    model, spec, tensors = sample
    recorder = Recorder(model, tensors, leaves)
    recorder.shares_casts = shares_casts(spec)
    flat = FlatForward(forward, spec)
    parameters, buffers = dict(model.named_parameters()), _buffers(model)
    try:
        outputs, has_draws = _run(recorder, flat, tensors, is_careful)
    finally:
        if recorder.restore():
            writing.add(model)
    if not recorder.is_valid or (has_draws and not is_careful):
        raise RecordAgain(is_careful or has_draws)
    nodes = [recorder.tensors.node(tensor) for tensor in outputs]
    recorder.raise_if_leaky()
    _refuse_new_parameters(model, parameters)
    _refuse_new_buffers(model, buffers, leaves)
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
            if failed in recorder.leaves and recorder.model.get_submodule(failed) not in unwatched:
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
    """Autocast may cast a parameter once for several uses; a leaf would do it for itself."""
    for node in graph.nodes:
        leaf = node.target
        if isinstance(leaf, Leaf) and leaf.autocast and any(len(held.users) > 1 for held in node.args[2]):
            why = "shares a parameter with other calls under autocast"
            raise OpaqueError(f"the leaf module {leaf.module} {why}; cast it outside the leaf", {leaf.module: why})


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


def _buffers(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, TensorSpec, int]]:
    """Each buffer, by name, with what it is like and where its memory is."""
    found = {name: (buffer, storage_of(buffer)) for name, buffer in model.named_buffers()}
    return {n: (b, TensorSpec.of(b), 0 if raw is None else id_of_storage(raw)) for n, (b, raw) in found.items()}


def _refuse_new_buffers(
    model: torch.nn.Module, before: Mapping[str, tuple[torch.Tensor, TensorSpec, int]], leaves: Collection[str]
) -> None:
    """Raise OpaqueError if the forward gave the model another buffer, or one of its buffers other memory or sizes."""
    for name, (buffer, *memory) in _buffers(model).items():
        known, *was = before.get(name, (None, None))
        if (known is buffer and memory == was) or any(name.startswith(f"{leaf}.") for leaf in leaves):
            continue
        does = "resizes the buffer" if known is buffer else "assigns a new tensor to the buffer"
        raise OpaqueError(
            f"the forward {does} {name}, which a replay would not repeat; update it in place (copy_, add_, mul_) "
            "instead, or call the model before it is optimized if its first call alone does so",
            {name.rpartition(".")[0]: "resizes buffers" if known is buffer else "assigns new tensors to buffers"},
        )

"""The door of ``torch.export``: the graph of aten operators that a non-strict export gives."""

from __future__ import annotations

import inspect
import torch

from ...torch_state.forwards import plain_forward
from ..arguments import Sample
from ..custom import CustomForward
from ..forward.flat import FlatForward
from .script_calls import fresh
from .places import FlatModule, note_places

aten = torch.ops.aten


def export(sample: Sample) -> CustomForward:
    """A :data:`~ogc.parser.doors.door.Tracer`."""
    flat = FlatModule(sample.model, FlatForward(plain_forward(sample.model), sample.spec))
    exported = torch.export.export(flat, tuple(sample.tensors), strict=False)
    made = exported.module(check_guards=False)
    _prepare(made, sample.model)
    return CustomForward(sample.model, made.graph, made, inspect.signature(made.forward))


def _prepare(made: torch.fx.GraphModule, model: torch.nn.Module) -> None:
    for module in made.modules():
        if isinstance(module, torch.fx.GraphModule):
            note_places(module.graph, model)
            for node in module.graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
                node.target = fresh
            for node in module.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
                node.args = (*node.args[:8], torch.backends.cudnn.enabled)  # which an export switches off

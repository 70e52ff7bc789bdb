"""The door of ``torch.export``: the graph of aten operators that a non-strict export gives."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...torch_state.forwards import plain_forward
from ...torch_state.private import schema_of
from ..arguments import Sample
from ..custom import CustomForward
from ..forward.flat import FlatForward
from .places import FlatModule, note_places
from .script_calls import fresh

aten = torch.ops.aten


def export(sample: Sample) -> CustomForward:
    """A :data:`~ogc.parser.doors.door.Tracer`."""
    flat = FlatModule(sample.model, FlatForward(plain_forward(sample.model), sample.spec))
    exported = torch.export.export(flat, tuple(sample.tensors), strict=False)
    made = exported.module(check_guards=False)
    _prepare(made, sample.model)
    return CustomForward(sample.model, made.graph, made, inspect.signature(made.forward))


def _prepare(made: torch.fx.GraphModule, model: torch.nn.Module) -> None:
    """Take out what the export has added, and changed by the flags that it sets."""
    for module in made.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        note_places(module.graph, model)
        for node in list(module.graph.nodes):
            if node.target is aten._assert_tensor_metadata.default:
                module.graph.erase_node(node)
            elif node.target is aten.lift_fresh_copy.default:
                node.target = fresh
            elif node.op == "call_function" and _takes_cudnn(node.target):
                node.args = (*node.args[:-1], torch.backends.cudnn.enabled)


def _takes_cudnn(operator: Any) -> bool:
    """Whether the last argument of a call is whether cuDNN is on."""
    arguments: Any = getattr(schema_of(operator), "arguments", None)
    return bool(arguments) and arguments[-1].name in ("cudnn_enable", "cudnn_enabled")

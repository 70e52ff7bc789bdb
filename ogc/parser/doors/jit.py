"""The door of ``torch.jit``: a traced, inlined TorchScript graph, run node by node as calls of aten operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...errors import ParseError
from ...torch_state.forwards import plain_forward
from ..arguments import Sample
from ..forward.flat import FlatForward, nothing_saved
from .places import FlatModule
from .script import Script
from .scripted import script_of


def jit(sample: Sample) -> Callable[..., Any]:
    """A :data:`~ogc.parser.doors.door.Tracer`; of a ScriptModule the graph that it has."""
    script = script_of(sample.model)
    if script is not None:
        run = Script(script.inlined_graph, script, sample.model, is_literal=True)
        return FlatForward(partial(_by_position, run, script.forward.schema), sample.spec)
    if not callable(getattr(torch.jit, "trace", None)):
        raise ParseError(
            'front_end="jit" needs torch.jit.trace, which this torch lacks; leave it away for the recorder'
        )
    flat = FlatModule(sample.model, FlatForward(plain_forward(sample.model), sample.spec))
    with warnings.catch_warnings(), nothing_saved():
        warnings.simplefilter("ignore")  # of numbers that are baked in, which are refused, and of torch.jit's end
        traced: Any = torch.jit.trace(flat, tuple(sample.tensors), check_trace=False)
    return Script(traced.inlined_graph, flat, flat.model)


def _by_position(run: Callable[..., Any], schema: Any, *args: Any, **kwargs: Any) -> Any:
    """Call it with arguments in the order of a schema, whose first is the module."""
    rest = schema.arguments[len(args) + 1 :]
    return run(*args, *(kwargs.get(one.name, one.default_value) for one in rest))

"""The door of dynamo: the one graph that it makes of the forward's bytecode, with all that it calls inlined."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from ...errors import ParseError
from ...torch_state.forwards import plain_forward
from ..arguments import Sample
from ..custom import CustomForward
from ..forward.flat import FlatForward, nothing_saved
from .places import note_places


def dynamo(sample: Sample) -> CustomForward:
    """A :data:`~ogc.parser.doors.door.Tracer`."""
    kept = _Kept()
    forward = plain_forward(sample.model)
    compiled = torch.compile(_under_another_name(forward), backend=kept.keep, fullgraph=True, dynamic=False)
    outputs = FlatForward(compiled, sample.spec)(*sample.tensors)
    return kept.as_forward(sample, outputs)


def _under_another_name(forward: Any) -> Any:
    """A function whose code is new: dynamo counts how often it compiles the same."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


class _Kept:
    """A backend of torch.compile that keeps the graph, and what goes in and comes out in its one call."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []
        self.inputs: list[Any] = []
        self.results: list[Any] = []

    def keep(self, made: torch.fx.GraphModule, _: Any) -> Any:
        self.made.append(made)

        def run(*inputs: Any) -> Any:
            with nothing_saved():
                results = made(*inputs)
            self.inputs, self.results = list(inputs), list(results)
            return results

        return run

    def as_forward(self, sample: Sample, outputs: list[torch.Tensor]) -> CustomForward:
        """The graph from the sample's tensors to the outputs."""
        if len(self.made) != 1:
            raise ParseError(f'front_end="dynamo": the forward is {len(self.made)} graphs of dynamo, not one')
        (made,), inputs, results = self.made, self.inputs, self.results
        self.made, self.inputs, self.results = [], [], []  # dynamo keeps each backend
        graph = torch.fx.Graph()
        given = {id(tensor): graph.placeholder(f"input_{n}") for n, tensor in enumerate(sample.tensors)}
        copies: dict[torch.fx.Node, Any] = {}
        source = made.graph
        for node, value in zip(source.find_nodes(op="placeholder"), inputs, strict=True):
            copies[node] = given.get(id(value), value)
        for node in source.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        (end,) = source.find_nodes(op="output")
        pairs = zip(end.args[0], results, strict=True)
        known = given | {id(value): copies[node] for node, value in pairs if isinstance(node, torch.fx.Node)}
        graph.output(tuple(known.get(id(tensor), tensor) for tensor in outputs))
        note_places(graph, sample.model)
        _refuse_custom_functions(graph)
        return CustomForward(sample.model, graph, made)


def _refuse_custom_functions(graph: torch.fx.Graph) -> None:
    """Raise ParseError where dynamo goes into a ``torch.autograd.Function``, whose backward is another then."""
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") == "autograd_function_apply":
            where = f"module '{node.meta['module']}', {node.meta['source']}"
            raise ParseError(
                f'front_end="dynamo" has no custom torch.autograd.Function, and the forward calls one ({where}). Take '
                '"jit", or leave it away for the recorder'
            )

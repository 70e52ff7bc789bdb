"""Stretches of operators that run as code that torch.compile makes of them, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import ParseError
from ...program.program import call_node, run_nodes


class Compiler:
    """Has stretches compiled, equal ones once.

    Args:
        backend: of torch.compile.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.made: dict[Any, Callable[..., Any]] = {}

    def code_for(self, graph: torch.fx.Graph, tensors: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        """What runs a stretch on tensors like these."""
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
        key = _text(graph), kinds
        if key not in self.made:
            module = torch.fx.GraphModule(torch.nn.Module(), graph)
            self.made[key] = torch.compile(module, backend=self.backend, fullgraph=True, dynamic=False)
        return self.made[key]


@dataclass(eq=False)
class Compiled:
    """A stretch as one operator.

    Attributes:
        name: identifies it in generated code.
        graph: the stretch; a placeholder for each argument, one tensor or several as output.
        live: the numbers of the arguments that it updates and its own results do not depend on.
        compiler: has it compiled when it first runs.
    """

    name: str
    graph: torch.fx.Graph
    live: tuple[int, ...]
    compiler: Compiler
    code: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def __name__(self) -> str:
        return "compiled"

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.code is None:
            return self._compiled(*tensors)
        return self.code(*tensors)

    def _compiled(self, *tensors: torch.Tensor) -> Any:
        """The result of the first call.

        Raises:
            ParseError: the stretch cannot be compiled.
        """
        code = self.compiler.code_for(self.graph, tensors)
        try:
            result = code(*tensors)
        except Exception as error:
            calls = [node for node in self.graph.nodes if node.op == "call_function"]
            raise ParseError(
                f"the operations from {calls[0]} to {calls[-1]}, in module {calls[0].meta.get('module', '')!r}, cannot "
                f"be compiled: {str(error).strip().partition(chr(10))[0]}; leave out compile=, or name the module in "
                "leaf_modules"
            ) from error
        self.code = code
        return result

    def plain(self, *tensors: torch.Tensor) -> Any:
        """The stretch, operator by operator."""
        return run_nodes(self.graph.nodes, tensors, _no_attribute, call_node)


def _text(graph: torch.fx.Graph) -> str:
    """The stretch with names by position."""
    places = {node: f"%{n}" for n, node in enumerate(graph.nodes)}
    return "\n".join(
        f"{node.op} {node.target if node.op == 'call_function' else ''} "
        + str(torch.fx.node.map_arg((node.args, node.kwargs), places.__getitem__))
        for node in graph.nodes
    )


def _no_attribute(name: str) -> None:
    raise AssertionError(f"a stretch is given {name} as an argument")

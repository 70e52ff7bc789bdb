"""Gives a graph for a call whose inputs differ in size, or in what Python reads out of them, by the same plan.

The forward is recorded anew for that call. Where it is the same program up to numbers, the weights and the plan of the
first one serve; what its operations save and share is seen again, as kernels are chosen by shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..errors import ParseError
from ..graph import Graph
from ..operators.sliced import Sliced
from ..program.leaf import Leaf
from ..program.program import Program
from ..program.structures import InputSpec
from ..torch_state.no_trace import untouched
from ..torch_state.plainly import plainly
from .arguments import call_arguments, check_devices
from .assemble import memory_of, program_of, values_of, versions_of
from .leaves import Leaves, refuse_root_hooks
from .parse import lower, record_program
from .traced import called_leaves
from .weigh.record import Record


@plainly()
def carry_over(model: torch.nn.Module, graph: Graph, sample_input: Any) -> Graph:
    """``graph`` as it is for another call; the weights of its operations stay those of the first one.

    The forward runs as often as in :func:`ogc.parse`, with the memory of inference; nothing is weighed.

    Raises:
        ParseError: it is another program.
    """
    program: Program = graph.program
    if any(isinstance(node.target, Sliced) for node in program.operations):
        raise ParseError("a plan in slices is not carried over")
    refuse_root_hooks(model)
    spec, tensors = InputSpec.of(*call_arguments(sample_input))
    home = check_devices(model, tensors)
    modules = sorted(called_leaves(program.graph))
    with untouched(given=spec.constants):
        recorded = record_program(model, spec, tensors, program.parse_graph, Leaves(model, modules))
        traced, observation = lower(model, recorded, tensors, home, _Repeating(program))
    _check_same_program(program.graph, traced.graph)
    taken = versions_of(traced.graph, observation)
    again = replace(program_of(spec, traced, observation, taken), parse_graph=program.parse_graph)
    seen = memory_of(observation.records, taken)
    operations = tuple(replace(op, **fields) for op, fields in zip(graph.operations, seen, strict=True))
    return replace(graph, operations=operations, values=values_of(observation), program=again)


class _Repeating:
    """Lets those leaves be called again that may be in a known program."""

    def __init__(self, program: Program) -> None:
        self.leaves = [node.target for node in program.operations if isinstance(node.target, Leaf)]
        self.begin()

    def begin(self) -> None:
        self.pending = iter(self.leaves)

    def __call__(self, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], record: Record) -> None:
        if not isinstance(node.target, Leaf):
            return
        known = next(self.pending, None)
        if known is not None and known.repeatable:
            node.target = replace(node.target, repeatable=True)
            record.random = True  # as it may draw numbers


def _check_same_program(known: torch.fx.Graph, new: torch.fx.Graph) -> None:
    """Raise ParseError unless two programs are the same up to numbers."""
    for then, now in zip(known.nodes, new.nodes, strict=False):
        alike = then.name == now.name and then.op == now.op and _same_target(then.target, now.target)
        if not alike or not _same((then.args, then.kwargs), (now.args, now.kwargs)):
            raise ParseError(
                f"the forward runs another program for these inputs: {now.name} at {now.meta.get('source', '')} in the "
                f"place of {then.name}"
            )
    if len(known.nodes) != len(new.nodes):
        raise ParseError(f"the forward runs {len(new.nodes)} operations for these inputs instead of {len(known.nodes)}")


def _same_target(a: Any, b: Any) -> bool:
    if isinstance(a, Leaf) and isinstance(b, Leaf):
        return (a.module, a.function, a.grad, a.autocast, a.new) == (b.module, b.function, b.grad, b.autocast, b.new)
    return bool(a == b)


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are the same up to numbers."""
    if isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node):
        return a.name == b.name
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool):
        return type(a) is type(b)
    return type(a) is type(b) and bool(a == b)

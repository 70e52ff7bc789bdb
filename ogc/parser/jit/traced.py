"""What a trace gives, and the comparisons in it that tell whether it holds for other sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...leaf import Leaf
from ...program import LIVE_ARGUMENTS, OutputSpec, operator_name


@dataclass(frozen=True)
class Traced:
    """A traced forward: its program, and the outputs and output structure of the traced call.

    Nodes of ``graph`` carry ``meta["module"]`` and ``meta["source"]``. Calls of :func:`same_number` stand where the
    forward made Python numbers of sizes; ``follows_sizes`` tells whether these are all. With ``other_overloads`` some
    operators are called as the plain forward would, not as the trace did: its outputs may have other bits. The
    backward ends at the tensors ``reached``; see :func:`ogc.parser.reached.reached`.
    """

    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    output_spec: OutputSpec
    outputs: list[torch.Tensor]
    requires_grad: list[bool] = field(default_factory=list)  # of each output
    follows_sizes: bool = False
    other_overloads: bool = False
    reached: frozenset[Any] = frozenset()


def same_number(now: Any, then: Any) -> bool:
    """In a program: whether a size, or what was computed from sizes, is the number that Python saw in the trace."""
    return bool(now == then)


def has_decisions(graph: torch.fx.Graph) -> bool:
    """Whether there is any :func:`same_number` in it."""
    return any(node.target is same_number for node in graph.nodes)


def without_decisions(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy without :func:`same_number` and what is computed for it alone."""
    dropped: set[torch.fx.Node] = set()
    pending = [node for node in graph.nodes if node.target is same_number]
    while pending:
        node = pending.pop()
        if node.op in ("call_function", "get_attr") and dropped.issuperset(node.users) and not has_effects(node.target):
            dropped.add(node)
            pending += node.all_input_nodes
    result = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node not in dropped:
            copies[node] = result.node_copy(node, copies.__getitem__)
    return result


def has_effects(operator: Any) -> bool:
    """Whether a call does more than it returns: it writes, draws random numbers, or may do anything."""
    schema, tags = getattr(operator, "_schema", None), getattr(operator, "tags", ())
    changes = bool(schema and schema.is_mutable) or isinstance(operator, Leaf)
    return changes or operator_name(operator) in LIVE_ARGUMENTS or torch.Tag.nondeterministic_seeded in tags

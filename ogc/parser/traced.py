"""What a front end gives, whatever reads the forward: a program, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ParseError
from ..operators.registry import live_positions
from ..program.leaf import Leaf
from ..program.program import Guards
from ..program.structures import OutputSpec


@dataclass(frozen=True)
class Traced:
    """A recorded forward: its program, and the outputs and output structure of the recorded call.

    Attributes:
        graph: call nodes carry ``meta["module"]`` and ``meta["source"]``.
        constants: tensors that are no attribute of the model, by the name of their ``get_attr`` node.
        output_spec: the structure of the result.
        outputs: its tensors, detached.
        requires_grad: of each output.
        reached: where the backward ends; see :func:`ogc.parser.passes.reached.reached`.
        guards: what Python read out of tensors on the way; the program holds as long as these are the same.
    """

    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    output_spec: OutputSpec
    outputs: list[torch.Tensor]
    requires_grad: list[bool] = field(default_factory=list)
    reached: frozenset[Any] = frozenset()
    guards: Guards | None = None


class OpaqueError(ParseError):
    """The forward does what no program can hold; modules that hide it, by name, and why each would have to."""

    def __init__(self, message: str, modules: dict[str, str]) -> None:
        super().__init__(message)
        self.modules = modules


def has_effects(operator: Any) -> bool:
    """Whether a call does more than it returns: it writes, checks, draws random numbers, or may do anything."""
    schema, tags = getattr(operator, "_schema", None), getattr(operator, "tags", ())
    changes = bool(schema and (schema.is_mutable or not schema.returns)) or isinstance(operator, Leaf)
    return changes or bool(live_positions(operator)) or torch.Tag.nondeterministic_seeded in tags


def called_leaves(graph: torch.fx.Graph) -> set[str]:
    """The submodules that a program calls as they are."""
    leaves = [node.target for node in graph.nodes if isinstance(node.target, Leaf)]
    return {leaf.module for leaf in leaves if leaf.submodule is not None}


def without_unused(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy without calls that nothing uses and that have no effect."""
    needed: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if (
            node.op in ("placeholder", "output")
            or node in needed
            or (node.op == "call_function" and has_effects(node.target))
        ):
            needed.add(node)
            needed.update(node.all_input_nodes)
    result = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node in needed:
            copies[node] = result.node_copy(node, copies.__getitem__)
    return result

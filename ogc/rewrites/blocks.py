"""Finds blocks of a program that may run a part at a time: attention, MLPs, norms, with what goes around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ..operators.registry import low_memory_variant, of, out_of_place
from ..program.program import SHAPE
from ..torch_state.private import OpOverload, schema_of
from .rules import Along, along, rule_of

Node = torch.fx.Node

LONGEST = 150
"""Operations of a block; one more would be worth little, as it would run most of a model again."""

HOLDS = 4
"""So many times what it takes and gives is made inside of a block that is worth its chunks."""


@dataclass(frozen=True)
class Block:
    """Calls in program order that take one tensor in parts; the last gives all that others use."""

    nodes: tuple[Node, ...]
    axes: dict[Node, int]  # of results and of all that is taken in parts, the axes along which these lie

    @property
    def is_chain(self) -> bool:
        """Whether each call takes the result of the one before, and nothing else does."""
        inside = set(self.nodes)
        used = [[one for one in node.all_input_nodes if one in self.axes] for node in self.nodes]
        return all(len(ones) == 1 for ones in used) and all(len(n.users) == 1 for n in inside - {self.nodes[-1]})

    @property
    def is_worth_it(self) -> bool:
        """Whether it makes much more than it takes and gives, by operators whose time is worth a slice."""
        entry = next(node for node in self.axes if node not in self.nodes)
        inside = sum(prod(shape_of(node)) for node in self.nodes)
        return inside >= HOLDS * max(prod(shape_of(entry)), prod(shape_of(self.nodes[-1]))) and any(
            rule_of(node.target).is_heavy for node in self.nodes
        )


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of the tensor that a node stands for; empty where it is none."""
    return tuple(node.meta.get(SHAPE, ())) if isinstance(node, Node) else ()


def has_shapes(node: Node) -> bool:
    """Whether the shapes of all that a call takes are known."""
    return all(SHAPE in one.meta for one in node.all_input_nodes)


class Blocks:
    """The blocks of a program; what is found out of a call is remembered."""

    def __init__(self) -> None:
        self.known: dict[tuple[Node, tuple[int | None, ...]], Along | None] = {}

    def all(self, nodes: Sequence[Node]) -> list[Block]:
        """Blocks that are no chains, in program order; none overlaps another."""
        found: list[Block] = []
        position = {node: t for t, node in enumerate(nodes)}
        free = 0
        for t, entry in enumerate(nodes):
            if t < free - 1 or len(entry.users) < 2:
                continue
            block = self.from_entry(entry)
            if block is not None and not block.is_chain:
                found.append(block)
                free = position[block.nodes[-1]] + 1
        return found

    def from_entry(self, entry: Node) -> Block | None:
        """The shortest block that takes this, along the longest axis that goes."""
        shape = shape_of(entry)
        axes = sorted((axis for axis in range(len(shape) - 1) if shape[axis] > 1), key=lambda axis: -shape[axis])
        return next((block for axis in axes if (block := self._grown(entry, axis)) is not None), None)

    def _grown(self, entry: Node, axis: int) -> Block | None:
        axes, node = {entry: axis}, entry
        nodes: list[Node] = []
        open_users: dict[Node, set[Node]] = {}  # of each of the nodes, who still waits for its result
        while len(nodes) < LONGEST and (node := node.next).op != "output":
            used = [one for one in node.all_input_nodes if one is entry or one in open_users]
            if not used:
                continue
            if schema_of(node.target) and schema_of(node.target).is_mutable and not _writes_its_own(node, nodes):
                return None
            if not self._join(node, axes, shape_of(entry)[axis]):
                return None
            nodes.append(node)
            open_users[node] = set(node.users)
            for one in used:
                if one is not entry:
                    open_users[one].discard(node)
            if open_users[node] and sum(map(bool, open_users.values())) == 1:
                block = Block(tuple(nodes), dict(axes))
                if block.is_worth_it:
                    return block
        return None

    def _join(self, node: Node, axes: dict[Node, int], size: int) -> bool:
        """Take a call into a block, if that may be."""
        if node.op == "call_function" and not isinstance(node.target, OpOverload):
            return self._join_item(node, axes)
        known = tuple(axes.get(one) for one in _tensors_of(node.args))
        if (node, known) not in self.known:
            self.known[node, known] = in_parts(node, axes)
        found = self.known[node, known]
        if found is None:
            return False
        for one, axis in zip(_tensors_of(node.args), found.given, strict=True):
            if axis is not None and (axes.setdefault(one, axis) != axis or shape_of(one)[axis] % size):
                return False
        axes[node] = found.result
        return SHAPE not in node.meta or shape_of(node)[found.result] % size == 0

    def _join_item(self, node: Node, axes: dict[Node, int]) -> bool:
        """Take an item of a list, all of which lie alike."""
        (given,) = node.all_input_nodes[:1] or [node]
        if SHAPE not in node.meta or given not in axes:
            return False
        axes[node] = axes[given]
        return True


def _writes_its_own(node: Node, nodes: Sequence[Node]) -> bool:
    """Whether all that a call writes was made by one of some calls, and nobody else sees that it is written."""
    written = node.args[0]
    if not isinstance(written, Node) or written not in nodes or out_of_place(node.target) is None:
        return False
    others = [user for user in written.users if user is not node]
    return all(user in nodes for user in others) and not any(of(one.target).moves for one in (written, *others))


def in_parts(node: Node, axes: dict[Node, int]) -> Along | None:
    """What a call is where some of the tensors that it takes are in parts; None where it must see the whole."""
    if not may_be_in_parts(node):
        return None
    known = tuple(axes.get(one) for one in _tensors_of(node.args))
    return along(node.target, map_aggregate(node.args, _stand_in), known)


def may_be_in_parts(node: Node) -> bool:
    """Whether a call depends on its arguments alone, and their shapes are known."""
    target = node.target
    if not isinstance(target, OpOverload) or not has_shapes(node):
        return False
    is_random = torch.Tag.nondeterministic_seeded in target.tags and rule_of(target).along is None
    return not is_random and not any(isinstance(value, Node) for value in node.kwargs.values())


def _stand_in(argument: Any) -> Any:
    return torch.empty(shape_of(argument), device="meta") if isinstance(argument, Node) else argument


def _tensors_of(args: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(args, found.append)
    return found


def copied_into(body: torch.fx.Graph, node: Node, copies: dict[Node, Node], axis: int, device: torch.device) -> Node:
    """A call in the body of a region, for parts along an axis of its result: sizes are those of any part."""
    new = body.node_copy(node, copies.__getitem__)
    if isinstance(node.target, OpOverload):
        target = out_of_place(node.target) or node.target
        new.target = low_memory_variant(target, device) or target
    if (sizes := rule_of(node.target).sizes) is not None:
        shape = [*shape_of(node)]
        shape[axis] = -1
        new.update_arg(sizes, shape)
    return new


def place_of(nodes: Sequence[Node]) -> str:
    """The modules that the first and the last of some calls are in."""
    names = [str(node.meta.get("module", "")) for node in (nodes[0], nodes[-1])]
    return names[0] if names[0] == names[1] else " to ".join(names)

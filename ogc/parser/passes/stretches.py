"""Finds the stretches of a program that can be run slice by slice, and puts one operator in the place of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ...errors import InputError
from ...operators.registry import Along, of
from ...operators.slices import Sliced
from ...torch_state.private import schema_of
from ..weigh.record import Record
from .blocks import Block, Blocks, copied_into, in_parts, place_of
from .losses import loss_head, put_in_slices

Stretch = tuple[str, str]
"""Names of the first and the last operation."""


def find_stretches(records: Sequence[Record]) -> list[Stretch]:
    """Stretches worth slicing, in program order.

    Each runs from one tensor to another, where nothing in between is used elsewhere, and ends where the data
    get narrower: cut at a wide place, all of it would have to be there.
    """
    nodes = [record.node for record in records]
    heads = [head.nodes for node in nodes if (head := loss_head(node)) is not None]
    blocks = [block.nodes for block in Blocks().all(nodes)]
    others = [block for block in blocks if not any(set(block) & set(head) for head in heads)]
    taken = {node for one in (*heads, *others) for node in one}
    found = [(one[0].name, one[-1].name) for one in (*heads, *others)]
    start = 0
    while start < len(records):
        stop = start
        while stop < len(records) and _may_be_next(records, start, stop, taken):
            stop += 1
        for first, last in pairwise(_ends(records, start, stop)):
            stretch = _trimmed(records, first, last)
            if stretch is not None:
                found.append(stretch)
        start = max(stop, start + 1)
    place = {record.node.name: t for t, record in enumerate(records)}
    return sorted(found, key=lambda stretch: place[stretch[0]])


def _may_be_next(records: Sequence[Record], start: int, t: int, taken: set[torch.fx.Node]) -> bool:
    """Whether the operation goes on with the chain that starts at ``start``."""
    if records[t].node in taken or not is_samplewise(records[t].node):
        return False
    return t == start or _continues(records, t)


def _continues(records: Sequence[Record], t: int) -> bool:
    """Whether the operation takes the result of the one before, and nothing else does."""
    before = records[t - 1].node
    return records[t].node.args[0] is before and list(before.users) == [records[t].node]


def _ends(records: Sequence[Record], start: int, stop: int) -> list[int]:
    """Positions between which the stretches of a chain lie: its ends, and where the data get narrower."""
    ends = [start]
    widest = 0
    for t in range(start, stop):
        size = records[t].outputs[0].bytes
        widest = max(widest, size)
        if 2 * size <= widest:
            ends.append(t + 1)
            widest = 0
    if ends[-1] < stop:
        ends.append(stop)
    return ends


def _trimmed(records: Sequence[Record], first: int, last: int) -> Stretch | None:
    """Without an operation at its start that writes to what it is given, and heavy ones at its end.

    Those need not be run again for their own backward, but would be. One operation and views are worth no slices.
    """
    while first < last and schema_of(records[first].node.target).is_mutable:
        first += 1
    while first < last and of(records[last - 1].node.target).is_heavy:
        last -= 1
    computing = [of(record.node.target) for record in records[first:last] if not of(record.node.target).moves]
    if len(computing) < 2 or not any(operator.is_heavy for operator in computing):
        return None
    return records[first].node.name, records[last - 1].node.name


def is_samplewise(node: torch.fx.Node) -> bool:
    """Whether the call can be part of a chain: samples lie along the first axis before and after it."""
    if of(node.target).along is None or not isinstance(node.args[0], torch.fx.Node):
        return False
    found = in_parts(node, {node.args[0]: 0})
    return found is not None and found == Along(0, (0, *[None] * (len(found.given) - 1)))


def slice_stretches(graph: torch.fx.Graph, stretches: Sequence[Stretch], slices: int, device: torch.device) -> None:
    """Put a :class:`Sliced`, of low-memory operators where the device has them, in the place of each stretch.

    Raises:
        InputError: a stretch is not one of the program's, or there are no slices.
    """
    if slices < 1:
        raise InputError(f"slices must be at least 1, not {slices}")
    for first, last in stretches:
        by_name = {node.name: node for node in graph.nodes}
        if first not in by_name or last not in by_name:
            raise InputError(f"the graph has no stretch from {first} to {last}; choose among graph.stretches")
        if (head := loss_head(by_name[last])) is not None and head.nodes[0] is by_name[first]:
            put_in_slices(head, slices, device)
        else:
            _replace(_block(by_name[first], by_name[last]), slices, device)


def _block(first: torch.fx.Node, last: torch.fx.Node) -> Block:
    """The block between two calls, or the chain."""
    blocks = Blocks()
    for entry in first.all_input_nodes:
        block = blocks.from_entry(entry)
        if block is not None and (block.nodes[0], block.nodes[-1]) == (first, last):
            return block
    node, nodes = first, [first]
    while node is not last:
        node = node.next
        nodes += [node] if node.op == "call_function" else []
    assert isinstance(first.args[0], torch.fx.Node)
    return Block(tuple(nodes), dict.fromkeys((first.args[0], *nodes), 0))


def _replace(block: Block, slices: int, device: torch.device) -> None:
    inside, last = set(block.nodes), block.nodes[-1]
    outside = dict.fromkeys(n for node in block.nodes for n in node.all_input_nodes if n not in inside)
    body = torch.fx.Graph()
    copies = {node: body.placeholder(node.name) for node in outside}
    for node in block.nodes:
        copies[node] = copied_into(body, node, copies, block.axes[node], device)
    body.output(copies[last])
    axes = tuple(block.axes.get(node) for node in outside)
    graph = last.graph
    with graph.inserting_after(last):
        stretch = Sliced(f"sliced_{block.nodes[0].name}", body, axes, slices, block.axes[last])
        new = graph.call_function(stretch, tuple(outside))
    last.replace_all_uses_with(new)
    new.meta.update(last.meta, module=place_of(block.nodes), operator="sliced")
    for node in reversed(block.nodes):
        graph.erase_node(node)

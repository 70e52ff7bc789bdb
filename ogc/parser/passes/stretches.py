"""Finds the stretches of a program that can be run slice by slice, and puts one operator in the place of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ...errors import InputError
from ...operators.registry import low_memory_form, of, out_of_place
from ...operators.slices import Sliced
from ...torch_state.private import schema_of
from ..weigh.record import Record
from .losses import loss_head, put_in_slices

Stretch = tuple[str, str]
"""Names of the first and the last operation."""


def find_stretches(records: Sequence[Record]) -> list[Stretch]:
    """Stretches worth slicing, in program order.

    Each runs from one tensor to another, where nothing in between is used elsewhere, and ends where the data
    get narrower: cut at a wide place, all of it would have to be there.
    """
    heads = [head for record in records if (head := loss_head(record.node)) is not None]
    taken = {node for head in heads for node in head.nodes}
    found = [(head.first.name, head.loss.name) for head in heads]
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
    if not records[t].is_samplewise or records[t].node in taken:
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
        size = records[t].output_bytes[0]
        widest = max(widest, size)
        if 2 * size <= widest:
            ends.append(t + 1)
            widest = 0
    if ends[-1] < stop:
        ends.append(stop)
    return ends


def _trimmed(records: Sequence[Record], first: int, last: int) -> Stretch | None:
    """Without an operation at its start that writes to what it is given, and heavy ones at its end.

    Those need not be run again for their own backward, but would be.
    """
    while first < last and schema_of(records[first].node.target).is_mutable:
        first += 1
    while first < last and of(records[last - 1].node.target).is_heavy:
        last -= 1
    if not any(of(record.node.target).is_heavy for record in records[first:last]):
        return None
    return records[first].node.name, records[last - 1].node.name


def is_samplewise(node: torch.fx.Node, args: Sequence[object]) -> bool:
    """Whether the call can be part of a stretch."""
    return not node.kwargs and of(node.target).by_sample(args)


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
        if (head := loss_head(by_name[last])) is not None and head.first is by_name[first]:
            put_in_slices(head, slices)
            continue
        node, inside = by_name[first], []
        while node is not by_name[last]:
            inside.append(node)
            node = node.next
        _replace([n for n in (*inside, node) if n.op == "call_function"], slices, device)


def _replace(inside: list[torch.fx.Node], slices: int, device: torch.device) -> None:
    first, last = inside[0], inside[-1]
    assert isinstance(first.args[0], torch.fx.Node)
    # All that a stretch takes from outside, but for what it starts from, is the same for each sample.
    outside = dict.fromkeys([first.args[0], *(n for node in inside for n in node.all_input_nodes if n not in inside)])
    body = torch.fx.Graph()
    copies = {node: body.placeholder(node.name) for node in outside}
    for node in inside:
        copies[node] = body.node_copy(node, copies.__getitem__)
        target = out_of_place(node.target) or node.target
        copies[node].target = low_memory_form(target, device) or target
    body.output(copies[last])
    graph = last.graph
    with graph.inserting_after(last):
        new = graph.call_function(Sliced(f"sliced_{first.name}", body, 1, slices), tuple(outside))
    last.replace_all_uses_with(new)
    names = [node.meta.get("module", "") for node in (first, last)]
    new.meta.update(last.meta, module=names[0] if names[0] == names[1] else " to ".join(names), operator="sliced")
    for node in reversed(inside):
        graph.erase_node(node)

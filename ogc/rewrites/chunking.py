"""Batches in chunks: finds regions of a program that can run chunk by chunk, and chooses those that bound the peak.

Each then becomes one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from ..errors import InputError, SolveError
from ..graph import Graph
from ..operators.registry import of
from ..parser import ParseOptions, parsed
from ..plan import Plan, simulate
from ..plan.simulate import plain_peak
from ..solver import LEAST, Budget, Goal, SolveOptions, solve
from ..torch_state.private import schema_of
from .blocks import Block, Blocks, copied_into, in_parts, place_of, shape_of
from .chunked import Chunked
from .losses import loss_head, put_in_chunks
from .rules import Along, rule_of

RegionEnds = tuple[str, str]
"""A region: names of its first and its last operation."""


@dataclass(frozen=True)
class Chunks:
    """A rewrite: each of some regions becomes one operation that runs so many ``chunks`` one by one."""

    regions: Sequence[RegionEnds]
    chunks: int

    def __call__(self, graph: torch.fx.Graph, device: torch.device) -> None:
        """Put a :class:`Chunked`, of low-memory operators where the device has them, in the place of each region."""
        if self.chunks < 1:
            raise InputError(f"chunks must be at least 1, not {self.chunks}")
        for first, last in self.regions:
            by_name = {node.name: node for node in graph.nodes}
            if first not in by_name or last not in by_name:
                raise InputError(f"the graph has no region from {first} to {last}; choose among graph.regions")
            if (head := loss_head(by_name[last])) is not None and head.nodes[0] is by_name[first]:
                put_in_chunks(head, self.chunks, device)
            else:
                _replace(_block(by_name[first], by_name[last]), self.chunks, device)


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


def _replace(block: Block, chunks: int, device: torch.device) -> None:
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
        call = Chunked(f"sliced_{block.nodes[0].name}", body, axes, chunks, block.axes[last])
        new = graph.call_function(call, tuple(outside))
    last.replace_all_uses_with(new)
    new.meta.update(last.meta, module=place_of(block.nodes), operator="chunked")
    for node in reversed(block.nodes):
        graph.erase_node(node)


# -- which regions there are -----------------------------------------------------------------------------------


def regions_of(graph: Graph) -> tuple[RegionEnds, ...]:
    """The regions of the model's forward that are worth chunking, in program order.

    They are losses with the layer before them, blocks, and chains: from one tensor to another, where nothing in between
    is used elsewhere. A chain ends where the data get narrower: cut at a wide place, all of it would have to be there.
    """
    nodes = graph.program.operations[: graph.end]
    heads = [head.nodes for node in nodes if (head := loss_head(node)) is not None]
    blocks = [block.nodes for block in Blocks().all(nodes)]
    others = [block for block in blocks if not any(set(block) & set(head) for head in heads)]
    taken = {node for one in (*heads, *others) for node in one}
    found = [(one[0].name, one[-1].name) for one in (*heads, *others)]
    start, sizes = 0, _result_bytes(graph, nodes)
    while start < len(nodes):
        stop = start
        while stop < len(nodes) and _may_be_next(nodes, start, stop, taken):
            stop += 1
        for first, last in pairwise(_ends(sizes, start, stop)):
            chain = _trimmed(nodes, first, last)
            if chain is not None:
                found.append(chain)
        start = max(stop, start + 1)
    place = {node.name: t for t, node in enumerate(nodes)}
    return tuple(sorted(found, key=lambda region: place[region[0]]))


def _may_be_next(nodes: Sequence[torch.fx.Node], start: int, t: int, taken: set[torch.fx.Node]) -> bool:
    """Whether an operation goes on with the chain that starts at ``start``."""
    if nodes[t] in taken or not _is_samplewise(nodes[t]):
        return False
    return t == start or (nodes[t].args[0] is nodes[t - 1] and list(nodes[t - 1].users) == [nodes[t]])


def _is_samplewise(node: torch.fx.Node) -> bool:
    """Whether the call can be part of a chain: samples lie along the first axis before and after it."""
    if rule_of(node.target).along is None or not isinstance(node.args[0], torch.fx.Node):
        return False
    found = in_parts(node, {node.args[0]: 0})
    return found is not None and found == Along(0, (0, *[None] * (len(found.given) - 1)))


def _result_bytes(graph: Graph, nodes: Sequence[torch.fx.Node]) -> list[float]:
    """Bytes of the first result of each operation; those of a view are its entries'."""
    sizes, entry_bytes = [], dict[int, float]()  # by value
    for node, op in zip(nodes, graph.operations, strict=False):
        entries = prod(shape_of(node))
        if op.writes:
            entry_bytes.setdefault(op.writes[0], graph.values[op.writes[0]].bytes / max(1, entries))
        sizes.append(entries * entry_bytes.get((*op.writes, *op.reads, -1)[0], 4.0))
    return sizes


def _ends(sizes: Sequence[float], start: int, stop: int) -> list[int]:
    """Positions between which the regions of a chain lie: its ends, and where the data get narrower."""
    ends, widest = [start], 0.0
    for t in range(start, stop):
        widest = max(widest, sizes[t])
        if 2 * sizes[t] <= widest:
            ends.append(t + 1)
            widest = 0.0
    if ends[-1] < stop:
        ends.append(stop)
    return ends


def _trimmed(nodes: Sequence[torch.fx.Node], first: int, last: int) -> RegionEnds | None:
    """Without an operation at its start that writes to what it is given, and heavy ones at its end.

    Those need not be recomputed for their own backward, but would be. One operation and views are worth no chunks.
    """
    while first < last and schema_of(nodes[first].target).is_mutable:
        first += 1
    while first < last and rule_of(nodes[last - 1].target).is_heavy:
        last -= 1
    computing = [rule_of(node.target) for node in nodes[first:last] if not of(node.target).moves]
    if len(computing) < 2 or not any(rule.is_heavy for rule in computing):
        return None
    return nodes[first].name, nodes[last - 1].name


# -- which of them to slice ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """A graph with ``regions`` chunked, and the plan that the goal gets on it, if any."""

    graph: Graph
    regions: tuple[RegionEnds, ...]
    plan: Plan | None


def chunk_batch(
    model: torch.nn.Module,
    sample_input: Any,
    graph: Graph,
    *,
    chunks: int,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    **parsing: Any,
) -> tuple[Graph, Plan]:
    """The graph and the plan with those regions run chunk by chunk that make the plan better.

    The region that holds most at the peak is chunked, with those like it, and the plan made anew, until none holds
    anything there. Regions are chosen by estimated weights; the plan is made on weights found like those of
    ``graph``.

    Args:
        model, sample_input, graph, parsing: what ``graph`` was parsed from, without chunks, and how; see
            :func:`ogc.parse`.
        chunks: into how many parts a region divides the batch.
        memory_budget, max_overhead: as for :func:`ogc.solve`.

    Raises:
        SolveError: nothing fits the budget, with chunks or without; the message is that of the last try.
    """
    solving = SolveOptions(Goal(memory_budget, max_overhead))
    return chunked_plan(model, sample_input, graph, chunks, ParseOptions(**parsing), solving)


def chunked_plan(
    model: torch.nn.Module,
    sample_input: Any,
    graph: Graph,
    chunks: int,
    parsing: ParseOptions,
    solving: SolveOptions,
) -> tuple[Graph, Plan]:
    """What :func:`chunk_batch` returns for these options."""
    failure: SolveError | None = None

    def choose(regions: tuple[RegionEnds, ...], profile: str) -> _Choice:
        nonlocal failure
        chunked = graph
        if regions:
            chunked = chunked_along(regions, model, sample_input, graph, chunks, parsing, profile)
        try:
            return _Choice(chunked, regions, solving.plan(chunked))
        except SolveError as error:
            failure = error
            return _Choice(chunked, regions, None)

    def rank(choice: _Choice) -> tuple[bool, float, float]:
        if choice.plan is None:
            return True, 0.0, 0.0
        costs = choice.plan.peak_bytes, choice.plan.overhead
        return False, *(costs if solving.goal.memory_budget in (None, LEAST) else costs[::-1])

    choices = [choose((), graph.profile)]
    while hot := _hot_regions(choices[-1]):
        choices.append(choose((*choices[-1].regions, *hot), "estimate"))
    best = min(choices, key=rank)
    if best.regions and graph.profile != "estimate":
        best = min(choices[0], choose(best.regions, graph.profile), key=rank)
    if best.plan is None:
        assert failure is not None
        raise failure
    return best.graph, best.plan


def chunked_along(
    regions: tuple[RegionEnds, ...],
    model: torch.nn.Module,
    sample_input: Any,
    graph: Graph,
    chunks: int,
    parsing: ParseOptions,
    profile: str | None = None,
) -> Graph:
    """The graph with these regions in chunks; raises InputError where it has no such region."""
    options = replace(parsing.as_for(graph), rewrite=Chunks(regions, chunks), plain_peak_bytes=plain_peak(graph))
    chunked = parsed(model, sample_input, replace(options, profile=profile or graph.profile))
    return replace(chunked, chunks=chunks, chunked=regions, unchunked=graph.without_program())


def _hot_regions(choice: _Choice) -> tuple[RegionEnds, ...]:
    """The region that holds most of what is alive at the peak, if one holds anything and chunking may still help.

    With it those that do the same, such as the same block of every other layer, which would be the next ones.
    """
    graph, plan = choice.graph, choice.plan or solve(choice.graph, memory_budget=LEAST)
    if plan.is_plain and choice.regions:
        return ()
    cost = simulate(graph, plan)
    position = {op.name: t for t, op in enumerate(graph.operations)}
    held = {}
    for region in graph.regions:
        first, last = (position[name] for name in region)
        inside = [v for v in cost.peak_values if first <= graph.producers[v] < last]
        held[region] = sum(graph.values[v].bytes for v in inside)
        if first <= cost.peak_event.operation <= last:
            op = graph.operations[cost.peak_event.operation]
            held[region] += op.backward_bytes if cost.peak_event.phase == "backward" else op.scratch_bytes
    hot = max(held, key=held.__getitem__, default=None)
    if hot is None or not held[hot]:
        return ()

    def described(region: RegionEnds) -> list[tuple[str, tuple[int, ...]]]:
        first, last = (position[name] for name in region)
        operations = graph.operations[first : last + 1]
        return [(op.target, tuple(graph.values[v].bytes for v in op.writes)) for op in operations]

    return tuple(region for region in graph.regions if described(region) == described(hot))

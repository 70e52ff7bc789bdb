"""Puts one compiled operator in the place of each of some stretches of a program."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...operators.registry import live_arguments, out_of_place
from ...operators.slices import Compiled, Compiler
from .blocks import place_of


@dataclass(frozen=True)
class Compilation:
    """Which stretches are to run compiled, by the names of their operations, and what compiles them."""

    stretches: tuple[tuple[str, ...], ...]
    compiler: Compiler


def compile_stretches(graph: torch.fx.Graph, compilation: Compilation) -> None:
    """Put a :class:`Compiled` in the place of each stretch that is there; others come with operators that unfold."""
    by_name = {node.name: node for node in graph.nodes}
    for names in compilation.stretches:
        if by_name.keys() >= set(names):
            _replace([by_name[name] for name in names], compilation.compiler)


def name_of(names: Sequence[str]) -> str:
    """What a stretch of these operations is called once it is one."""
    return f"compiled_{names[0]}"


def _writes_given(node: torch.fx.Node, inside: set[torch.fx.Node]) -> bool:
    """Whether an operation writes in place what the stretch is given; there it takes over nothing."""
    return out_of_place(node.target) is not None and node.args[0] not in inside


def _replace(nodes: Sequence[torch.fx.Node], compiler: Compiler) -> None:
    inside, graph, last = set(nodes), nodes[0].graph, nodes[-1]
    given = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    results = [node for node in nodes if not inside.issuperset(node.users)]
    body = torch.fx.Graph()
    copies = {node: body.placeholder(f"given_{n}") for n, node in enumerate(given)}
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
        if _writes_given(node, inside):
            copies[node].target = out_of_place(node.target)
    body.output(copies[results[0]] if len(results) == 1 else tuple(copies[one] for one in results))
    live = {one for node in nodes for one in live_arguments(node.target, node.args)}
    numbers = tuple(n for n, node in enumerate(given) if node in live)
    with graph.inserting_after(last):
        code = Compiled(name_of([node.name for node in nodes]), body, numbers, compiler)
        new = graph.call_function(code, tuple(given))
    new.meta.update(last.meta, module=place_of(nodes), operator="compiled")
    made, after = [new], new
    if len(results) > 1:
        made = []
        for number in range(len(results)):
            with graph.inserting_after(after):
                after = graph.call_function(operator.getitem, (new, number))
            after.meta.update(results[number].meta)
            made.append(after)
    for old, one in zip(results, made, strict=True):
        old.replace_all_uses_with(one, lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)

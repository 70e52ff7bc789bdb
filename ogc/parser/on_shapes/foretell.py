"""The program of a call of another size: its numbers lie on a curve through those of programs that were recorded.

Where a batch grows, the sizes in a program grow along a line; where a sequence does, some are squares. The curve is the
polynomial through all that are known. What it foretells is to be held against a recording where it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch.fx.node import map_arg

from ...errors import ParseError
from ...program.program import SHAPE
from ...torch_state.compare import same_bits
from ..carry_over import check_same_program
from ..traced import ALIVE, BYTES, CALL, HISTORY, Traced


def foretold_program(known: Sequence[Traced], sizes: Sequence[int], size: int) -> Traced:
    """What a step runs for ``size``, by what it runs for some others.

    Tensors that depend on the size have the shape that they would have, and no content.

    Raises:
        ParseError: the programs differ in more than numbers, or these lie on no such curve.
    """
    first, at = known[0], _Curve(sizes, size)
    for other in known[1:]:
        check_same_program(first.graph, other.graph)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for nodes in zip(*(traced.graph.nodes for traced in known), strict=True):
        node = copies[nodes[0]] = graph.node_copy(nodes[0], copies.__getitem__)
        args, kwargs = at.of([(one.args, one.kwargs) for one in nodes])
        node.args, node.kwargs = map_arg((args, kwargs), copies.__getitem__)
        if SHAPE in node.meta:
            node.meta[SHAPE] = at.of([tuple(one.meta[SHAPE]) for one in nodes])
        if BYTES in node.meta:
            node.meta[BYTES] = at.of([one.meta[BYTES] for one in nodes])
        if HISTORY in node.meta:
            saved = at.of([one.meta[HISTORY].bytes for one in nodes])
            node.meta[HISTORY] = node.meta[HISTORY]._replace(bytes=saved)
    constants = {name: at.tensor([traced.constants[name] for traced in known]) for name in first.constants}
    outputs = [at.tensor(list(each)) for each in zip(*(traced.outputs for traced in known), strict=True)]
    return replace(first, graph=graph, constants=constants, outputs=outputs)


def shares(places: Sequence[int], place: int) -> list[Fraction]:
    """What each of the numbers at some places counts at another, on the polynomial through all of them."""
    return [
        prod((Fraction(place - other, one - other) for other in places if other != one), start=Fraction(1))
        for one in places
    ]


class _Curve:
    """The polynomials through what is known for some sizes, at another."""

    def __init__(self, sizes: Sequence[int], size: int) -> None:
        self.shares = shares(sizes, size)

    def of(self, known: Sequence[Any]) -> Any:
        """Arguments, from such that are alike up to numbers; nodes are those of the first."""
        first = known[0]
        if isinstance(first, dict):
            return {key: self.of([one[key] for one in known]) for key in first}
        if isinstance(first, (list, tuple)):
            return type(first)(self.of(each) for each in zip(*known, strict=True))
        if isinstance(first, slice):
            return slice(*self.of([(one.start, one.stop, one.step) for one in known]))
        if isinstance(first, bool) or not isinstance(first, int):
            return first  # no size is a fraction
        return self._number(known)

    def tensor(self, known: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that all of them are, or one without content."""
        first = known[0]
        if all(one is first or (not one.is_meta and same_bits(one, first)) for one in known):
            return first
        shape, strides = (self.of([layout(one) for one in known]) for layout in _LAYOUT)
        made = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)
        return made if made.is_meta else made.zero_()

    def _number(self, known: Sequence[int]) -> int:
        found = sum(share * number for share, number in zip(self.shares, known, strict=True))
        if found != int(found):
            raise ParseError(f"numbers of the program are {list(known)} for the sizes known, which foretells no others")
        return int(found)


_LAYOUT: tuple[Callable[[torch.Tensor], tuple[int, ...]], ...] = (lambda t: tuple(t.shape), lambda t: tuple(t.stride()))


def same_program(ours: Traced, theirs: Traced) -> bool:
    """Whether two programs are the same, numbers and shapes of constants and outputs included."""
    nodes = [
        [
            (node.name, node.op, node.target, *_named((node.args, node.kwargs)), *_noted(node))
            for node in traced.graph.nodes
        ]
        for traced in (ours, theirs)
    ]
    layouts = [
        [(tuple(t.shape), t.stride(), t.dtype) for t in (*traced.constants.values(), *traced.outputs)]
        for traced in (ours, theirs)
    ]
    return nodes[0] == nodes[1] and layouts[0] == layouts[1]


def _noted(node: torch.fx.Node) -> tuple[Any, ...]:
    """What was noted of a node that decides what is weighed."""
    return tuple(node.meta.get(SHAPE, ())), *map(node.meta.get, (CALL, ALIVE, BYTES, HISTORY))


def _named(arguments: Any) -> Any:
    return map_arg(arguments, lambda node: f"%{node.name}")

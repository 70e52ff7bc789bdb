"""Graphs for sizes that were not looked at, by those for some that were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

from ..errors import InputError
from ..graph import Graph
from ..parser.on_shapes import shares

Part = TypeVar("Part")


def foretold(graphs: Sequence[Graph], sizes: Sequence[int], size: int) -> Graph:
    """The graph for a size, by those for three others: each number lies on the parabola through theirs.

    Seconds lie on the line through the outer ones, as they are measured.

    Raises:
        InputError: the graphs differ in more than numbers.
    """
    first = graphs[0]
    for other in graphs[1:]:
        alike = len(other) == len(first) and all(
            (a.target, a.reads, a.writes, a.saves) == (b.target, b.reads, b.writes, b.saves)
            for a, b in zip(first.operations, other.operations, strict=True)
        )
        if not alike:
            raise InputError(
                f"the model computes another program for size {sizes[0]} than for {sizes[-1]}, from which other sizes "
                "cannot be foretold; give a make_sample whose samples differ in size alone"
            )
    parabola, line = shares(sizes, size), shares((sizes[0], sizes[-1]), size)

    def mixed(parts: Sequence[Part]) -> Part:
        found: dict[str, Any] = {}
        for name in type(parts[0]).__dataclass_fields__:  # type: ignore[attr-defined]
            numbers = [getattr(part, name) for part in parts]
            if name.endswith("_seconds") and None not in numbers:
                found[name] = max(0.0, mixed_number(line, (numbers[0], numbers[-1])))
            elif name.endswith(("bytes", "_flops")) and None not in numbers:
                found[name] = max(0, round(mixed_number(parabola, numbers)))
            elif name == "low_memory" and None not in numbers:
                found[name] = mixed(numbers)
        return replace(parts[0], **found)  # type: ignore[type-var]

    return replace(
        first,
        operations=tuple(mixed(each) for each in zip(*(graph.operations for graph in graphs), strict=True)),
        values=tuple(mixed(each) for each in zip(*(graph.values for graph in graphs), strict=True)),
        program=None,
    )


def mixed_number(shares: Sequence[Fraction], numbers: Sequence[float]) -> float:
    """The sum of some numbers, each by its share."""
    return float(sum(share * number for share, number in zip(shares, numbers, strict=True)))


def paced(graph: Graph, measured: Graph, estimated: Graph) -> Graph:
    """A graph whose times are estimated, at the pace that each operation had where it was ``measured``.

    Args:
        graph, estimated: with estimated times, for two sizes.
        measured: for the size of ``estimated``.
    """

    def one(now: Part, then: Part, guess: Part) -> Part:
        found: dict[str, Any] = {}
        for name in type(now).__dataclass_fields__:  # type: ignore[attr-defined]
            numbers = [getattr(part, name) for part in (now, then, guess)]
            if name.endswith("_seconds") and None not in numbers and numbers[2]:
                found[name] = numbers[0] * numbers[1] / numbers[2]
            elif name == "low_memory" and None not in numbers:
                found[name] = one(*numbers)
        return replace(now, **found)  # type: ignore[type-var]

    each = zip(graph.operations, measured.operations, estimated.operations, strict=True)
    return replace(graph, operations=tuple(one(*three) for three in each))

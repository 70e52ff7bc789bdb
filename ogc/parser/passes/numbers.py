"""Puts the numbers of a program that was recorded anew into the form in which the first one is planned."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import isfinite
from typing import Any

import torch

from ...program.leaf import Leaf
from ...program.program import SHAPE
from ...torch_state.private import pytree

SPECIAL = (0.0, 1.0, -1.0, 2.0, 0.5)
"""Numbers for which an operator may do something else, such as save nothing: x ** 2, a dropout of nothing."""
ARITHMETIC = ("add", "sub", "rsub", "mul", "div")
"""Operators for which no number is special."""


def with_numbers(planned: torch.fx.Graph, known: torch.fx.Graph, new: torch.fx.Graph) -> torch.fx.Graph | None:
    """A copy of ``planned``, a form of the recorded program ``known``, with the floats of ``new`` in their places.

    ``new`` is the same program up to numbers. None unless floats alone differ that no operator takes for special,
    shapes do not, and each of these floats is in the planned form as it was recorded.
    """
    changed: dict[str, tuple[list[Any], list[Any]]] = {}
    for then, now in zip(known.nodes, new.nodes, strict=True):
        if then.meta.get(SHAPE) != now.meta.get(SHAPE) or isinstance(then.target, Leaf):
            return None
        ours, theirs = _leaves(then), _leaves(now)
        if different := [(a, b) for a, b in zip(ours, theirs, strict=True) if _text(a) != _text(b)]:
            special = () if getattr(then.target, "__name__", "").partition(".")[0] in ARITHMETIC else SPECIAL
            if not all(_is_usual(number, special) for pair in different for number in pair):
                return None
            changed[then.name] = ours, theirs
    result = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in planned.nodes:
        copies[node] = copy = result.node_copy(node, copies.__getitem__)
        if node.name in changed:
            ours, theirs = changed.pop(node.name)
            if list(map(_text, _leaves(node))) != list(map(_text, ours)):
                return None
            copy.args, copy.kwargs = pytree.tree_map(partial(_next_number, iter(theirs)), (copy.args, copy.kwargs))
    return None if changed else result


def _leaves(node: torch.fx.Node) -> list[Any]:
    """What a node takes, in order."""
    return pytree.tree_leaves((node.args, node.kwargs))


def _text(leaf: Any) -> str:
    """Tells any two numbers apart, and nodes of any two programs by their names."""
    return leaf.name if isinstance(leaf, torch.fx.Node) else repr(leaf)


def _is_usual(number: Any, special: tuple[float, ...]) -> bool:
    return isinstance(number, float) and isfinite(number) and number not in special


def _next_number(numbers: Iterator[Any], leaf: Any) -> Any:
    number = next(numbers)
    return leaf if isinstance(leaf, torch.fx.Node) else number

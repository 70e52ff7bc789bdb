"""Puts the numbers of a program that was recorded anew into the form in which the first one is planned."""

from __future__ import annotations

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

    None unless the two recorded programs are the same up to floats that no operator takes for special, shapes included,
    and each of these floats is in the planned form as it was recorded.
    """
    pairs = list(zip(known.nodes, new.nodes, strict=False))
    if len(known.nodes) != len(new.nodes) or not all(_is_same_call(then, now) for then, now in pairs):
        return None
    changed = {then.name: (then, now) for then, now in pairs if _leaves(then) != _leaves(now)}
    result = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in planned.nodes:
        copies[node] = result.node_copy(node, copies.__getitem__)
        if node.name in changed:
            then, now = changed.pop(node.name)
            if _leaves(node) != _leaves(then):
                return None
            _, structure = pytree.tree_flatten((copies[node].args, copies[node].kwargs))
            copies[node].args, copies[node].kwargs = pytree.tree_unflatten(
                [ours if isinstance(ours, torch.fx.Node) else number for ours, number in _zipped(copies[node], now)],
                structure,
            )
    return None if changed else result


def _is_same_call(then: torch.fx.Node, now: torch.fx.Node) -> bool:
    alike = (then.op, then.name, then.meta.get(SHAPE)) == (now.op, now.name, now.meta.get(SHAPE))
    if not alike or then.target != now.target or isinstance(then.target, Leaf):
        return False
    ours, theirs = _flat(then), _flat(now)
    special = () if getattr(then.target, "__name__", "").partition(".")[0] in ARITHMETIC else SPECIAL
    return ours[1] == theirs[1] and all(map(partial(_is_same, special), ours[0], theirs[0]))


def _is_same(special: tuple[float, ...], then: Any, now: Any) -> bool:
    if isinstance(then, torch.fx.Node):
        return isinstance(now, torch.fx.Node) and then.name == now.name
    if type(then) is not type(now):
        return False
    are_usual = isinstance(then, float) and isfinite(now) and then not in special and now not in special
    return repr(then) == repr(now) or are_usual


def _flat(node: torch.fx.Node) -> tuple[list[Any], Any]:
    return pytree.tree_flatten((node.args, node.kwargs))


def _leaves(node: torch.fx.Node) -> list[str]:
    """What a node takes, in words that tell any two numbers apart."""
    return [leaf.name if isinstance(leaf, torch.fx.Node) else repr(leaf) for leaf in _flat(node)[0]]


def _zipped(node: torch.fx.Node, other: torch.fx.Node) -> list[tuple[Any, Any]]:
    return list(zip(_flat(node)[0], _flat(other)[0], strict=True))

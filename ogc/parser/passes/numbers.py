"""Numbers of a planned program for another call, by what a forward along the recorded program took.

A recorded program and its planned form have most calls in common, by name. Where a call takes other numbers, so does
the planned one. Calls that only the planned form has are parts of an unfolded one, or copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ...program.program import Guards, LowMemoryVariant, Place, Program, Saved, leaves_of
from ...program.tensors import Layout
from ..traced import SEEN, Followed, Seen, Unlike
from .calls import UNFOLDED, unfolds

SPECIAL = (0.0, 1.0, -1.0, 2.0, 0.5)
"""Floats for which an operator may do something else: x ** 2, a dropout of nothing."""
ARITHMETIC = ("add", "sub", "rsub", "mul", "div")
"""Operators for which no number is special."""

Numbers = dict[Place, Any]


def numbers_of(program: Program, known: torch.fx.Graph, found: Followed) -> Numbers:
    """The numbers that a forward along the recorded program ``known`` took in the places of others.

    Raises:
        Unlike: ``program``, the planned form of that, has them in another form.
    """
    recorded, planned = ({node.name: node for node in graph.nodes} for graph in (known, program.graph))
    numbers: Numbers = {}
    for node, theirs in ((recorded[name], found.taken[name]) for name in found.changed):
        ours = leaves_of(node.args, node.kwargs)
        changed = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if b is not None and repr(a) != repr(b)]
        _check_numbers(node, (x for n in changed for x in (ours[n], theirs[n])))
        one = planned.get(node.name)
        if one is None or list(map(_text, leaves_of(one.args, one.kwargs))) != list(map(_text, ours)):
            raise Unlike(f"{node.name} is planned in another form")
        numbers |= {(node.name, n): theirs[n] for n in changed}
    return numbers


def _check_numbers(node: torch.fx.Node, numbers: Iterable[Any]) -> None:
    special = () if getattr(node.target, "__name__", "").partition(".")[0] in ARITHMETIC else SPECIAL
    for number in numbers:
        if isinstance(number, float) and (not isfinite(number) or number in special):
            raise Unlike(f"{node.name} takes the number {number}")
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            raise Unlike(f"{node.name} takes {number!r}")


def looked_at(program: Program, known: torch.fx.Graph) -> dict[str, bool]:
    """The calls of the recorded program ``known`` that are looked at closely, as :func:`follow` takes them.

    Those that are planned in another form must be given what is alike. Of others, :func:`check_memory` has to know
    what they are given and save.
    """
    each = list(zip(program.operations, program.saves, strict=True))
    views = (node.name for node, saves in each if any(saved.layout is not None for saved in saves))
    variants = (program.operations[t].name for t in program.variants)
    unfolded = (node.meta[UNFOLDED][0] for node, _ in each if UNFOLDED in node.meta)
    planned = {node.name: node.target for node in program.graph.nodes}
    calls = (node for node in known.nodes if node.op == "call_function")
    in_other_form = {node.name: True for node in calls if planned.get(node.name) != node.target}
    return dict.fromkeys((*views, *variants, *unfolded), False) | in_other_form


def check_memory(program: Program, known: torch.fx.Graph, found: Followed) -> tuple[tuple[Saved, ...], ...]:
    """What each operation of ``program`` saves for the call of such a forward.

    Raises:
        Unlike: an operation takes something else there than in ``known``, which its form depends on.
    """
    then = {node.name: node for node in known.nodes}
    _check_unfolded(program, then, found)
    for t, variant in program.variants.items():
        _check_variant(program.operations[t], variant, then, found)
    each = zip(program.operations, program.saves, strict=True)
    return tuple(_saves(saves, node, then.get(node.name), found.seen.get(node.name)) for node, saves in each)


def _saves(planned: tuple[Saved, ...], node: torch.fx.Node, then: Any, seen: Seen | None) -> tuple[Saved, ...]:
    """What an operation saves, with the layouts of the other call."""
    if all(saved.layout is None for saved in planned):
        return planned
    before: Seen | None = None if then is None else then.meta.get(SEEN)
    if before is None or seen is None or then.target != node.target or len(before.saves) != len(planned):
        raise Unlike(f"{node.name} saves a view")
    result = []
    for saved, one, other in zip(planned, before.saves, seen.saves, strict=True):
        if saved.layout is None:
            result.append(saved)
        elif one is None or other is None or one[1] != saved.layout:
            raise Unlike(f"{node.name} saves a view")
        else:
            result.append(replace(saved, layout=other[1]))
    return tuple(result)


def _check_unfolded(program: Program, then: dict[str, torch.fx.Node], found: Followed) -> None:
    """Raise Unlike unless each unfolded call is made of the same for the other call, with the same bits."""
    tried: dict[Any, Any] = {}
    for name, made_of in dict(n.meta[UNFOLDED] for n in program.operations if UNFOLDED in n.meta).items():
        node, seen = then[name], found.seen[name]
        key = node.target, seen, tuple(found.taken[name])
        if key not in tried:
            tried[key] = unfolds(node.target, *_arguments(node, found, "cpu"))
        if tried[key] is None or tried[key] != made_of:
            raise Unlike(f"{name} is made of something else")


def _check_variant(
    node: torch.fx.Node, variant: LowMemoryVariant, then: dict[str, torch.fx.Node], found: Followed
) -> None:
    """Raise Unlike unless the low-memory variant of an operation is for such a call, too."""
    seen = found.seen.get(node.name)
    if seen is None or any(saved.layout is not None for saved in variant.saves):
        raise Unlike(f"{node.name} has another variant")
    is_here = all(spec.device.type == "cpu" for spec in seen.given)
    args, _ = _arguments(then[node.name], found, "meta")
    with torch.enable_grad():
        if not ((is_here or variant.target.writes_over) and variant.target.pays(*args)):
            raise Unlike(f"{node.name} has another variant")


def _arguments(node: torch.fx.Node, found: Followed, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like those of a call, on a device."""
    seen = found.seen[node.name]
    tensors, numbers, drawn = iter(seen.given), iter(found.taken[node.name]), torch.Generator().manual_seed(0)

    def like(leaf: Any) -> Any:
        number = next(numbers)
        if not isinstance(leaf, torch.fx.Node):
            return number
        spec = next(tensors)
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        if device != "meta":
            memory = torch.randn(Layout(spec.shape, spec.stride).span, generator=drawn)
            memory = memory > 0 if spec.dtype == torch.bool else memory.to(spec.dtype)
            made = memory.as_strided(spec.shape, spec.stride)
        return made.requires_grad_(spec.requires_grad)

    args, kwargs = map_aggregate((node.args, node.kwargs), like)
    return tuple(args), dict(kwargs)


def _text(leaf: Any) -> str:
    """The same for all nodes, of which another form may have others in their places."""
    return "" if isinstance(leaf, torch.fx.Node) else repr(leaf)


# -- guards ----------------------------------------------------------------------------------------------


def guards_along(known: Guards | None, found: Followed) -> Guards | None:
    """The guards of the recorded program with the numbers of another call; what they read is to be found out.

    Raises:
        Unlike: they take numbers that no call of the program does.
    """
    if known is None:
        return None
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in known.graph.nodes:
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        leaves = leaves_of(node.args, node.kwargs)
        if not any(type(leaf) in (int, float) for leaf in leaves):
            continue
        taken = found.taken.get(node.name, [])
        if len(taken) != len(leaves):
            raise Unlike(f"Python reads {node.name}")
        numbers = iter(taken)
        copy.args, copy.kwargs = map_aggregate((copy.args, copy.kwargs), lambda leaf: _number(next(numbers), leaf))  # noqa: B023
    return replace(known, graph=graph)


def _number(number: Any, leaf: Any) -> Any:
    return leaf if isinstance(leaf, torch.fx.Node) else number

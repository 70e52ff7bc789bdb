"""Numbers of a planned program for another call, taken from a recording of that call.

A recorded program and its planned form have most calls in common, by name. Where a call takes other numbers in another
recording, so does the planned one. Calls that only the planned form has are parts of an unfolded one, or copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ...operators.elementwise import WrittenOver
from ...program.program import LowMemoryVariant, Place, Program, Saved
from ...program.tensors import Layout
from ..traced import SEEN, Seen
from .calls import UNFOLDED, unfolds

SPECIAL = (0.0, 1.0, -1.0, 2.0, 0.5)
"""Floats for which an operator may do something else: x ** 2, a dropout of nothing."""
ARITHMETIC = ("add", "sub", "rsub", "mul", "div")
"""Operators for which no number is special."""

Numbers = dict[Place, Any]


class Unlike(Exception):
    """A recording that no planned form is known for; the argument says why."""


def leaves_of(node: torch.fx.Node) -> list[Any]:
    """What a node takes, in order."""
    found: list[Any] = []
    map_aggregate((node.args, node.kwargs), found.append)
    return found


def numbers_of(program: Program, known: torch.fx.Graph, new: torch.fx.Graph) -> Numbers:
    """The numbers of ``new`` that are others than those of ``known``, which ``program`` is the planned form of.

    Both recordings must be the same program up to numbers.

    Raises:
        Unlike: the planned form may not be that of the new program, or what its calls save is not seen.
    """
    planned = {node.name: node for node in program.graph.nodes}
    numbers: Numbers = {}
    for then, now in zip(known.nodes, new.nodes, strict=True):
        ours, theirs = leaves_of(then), leaves_of(now)
        changed = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if _text(a) != _text(b)]
        if changed:
            _check_numbers(then, (x for n in changed for x in (ours[n], theirs[n])))
            found = planned.get(then.name)
            if found is None or list(map(_number, leaves_of(found))) != list(map(_number, ours)):
                raise Unlike(f"{then.name} is planned in another form")
            numbers |= {(then.name, n): theirs[n] for n in changed}
    return numbers


def _check_numbers(node: torch.fx.Node, numbers: Iterable[Any]) -> None:
    special = () if getattr(node.target, "__name__", "").partition(".")[0] in ARITHMETIC else SPECIAL
    for number in numbers:
        if isinstance(number, float) and (not isfinite(number) or number in special):
            raise Unlike(f"{node.name} takes the number {number}")
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            raise Unlike(f"{node.name} takes {number!r}")


def check_memory(program: Program, known: torch.fx.Graph, new: torch.fx.Graph) -> tuple[tuple[Saved, ...], ...]:
    """What each operation of ``program`` saves for the call of the recording ``new``.

    Raises:
        Unlike: an operation saves, shares or takes something else there than in ``known``, or that is not seen.
    """
    then = {node.name: node for node in known.nodes}
    now = {node.name: node for node in new.nodes}
    for name, node in now.items():
        before, seen = then[name].meta.get(SEEN), node.meta.get(SEEN)
        if (before is None) != (seen is None) or (seen is not None and not seen.is_like(before)):
            raise Unlike(f"{name} does something else to memory")
    _check_unfolded(program, now)
    for t, variant in program.variants.items():
        _check_variant(program.operations[t], variant, now)
    each = zip(program.operations, program.saves, strict=True)
    return tuple(_saves(saves, node, then.get(node.name), now.get(node.name)) for node, saves in each)


def _saves(planned: tuple[Saved, ...], node: torch.fx.Node, then: Any, now: Any) -> tuple[Saved, ...]:
    """What an operation saves, with the layouts of the other call."""
    if all(saved.layout is None for saved in planned):
        return planned
    before, seen = (None if one is None else one.meta.get(SEEN) for one in (then, now))
    if before is None or seen is None or then.target != node.target or len(before.saves) != len(planned):
        raise Unlike(f"{node.name} saves a view")
    found = []
    for saved, one, other in zip(planned, before.saves, seen.saves, strict=True):
        if saved.layout is not None and (one is None or one[1] != saved.layout):
            raise Unlike(f"{node.name} saves a view")
        found.append(saved if saved.layout is None else replace(saved, layout=other[1]))
    return tuple(found)


def _check_unfolded(program: Program, now: dict[str, torch.fx.Node]) -> None:
    """Raise Unlike unless each unfolded call is made of the same for the new recording, with the same bits."""
    tried: dict[Any, Any] = {}
    for name, made_of in dict(n.meta[UNFOLDED] for n in program.operations if UNFOLDED in n.meta).items():
        seen, numbers = now[name].meta.get(SEEN), [x for x in leaves_of(now[name]) if not isinstance(x, torch.fx.Node)]
        key = now[name].target, seen, tuple(numbers)
        if key not in tried:
            tried[key] = None if seen is None else unfolds(now[name].target, *_arguments(now[name], seen, "cpu"))
        if tried[key] is None or tried[key] != made_of:
            raise Unlike(f"{name} is made of something else")


def _check_variant(node: torch.fx.Node, variant: LowMemoryVariant, now: dict[str, torch.fx.Node]) -> None:
    """Raise Unlike unless the low-memory variant of an operation is for such a call, too."""
    seen = None if node.name not in now else now[node.name].meta.get(SEEN)
    if seen is None or any(saved.layout is not None for saved in variant.saves):
        raise Unlike(f"{node.name} has another variant")
    is_here = all(spec.device.type == "cpu" for spec in seen.given)
    args, _ = _arguments(now[node.name], seen, "meta")
    with torch.enable_grad():
        if not ((is_here or isinstance(variant.target, WrittenOver)) and variant.target.pays(*args)):
            raise Unlike(f"{node.name} has another variant")


def _arguments(node: torch.fx.Node, seen: Seen, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like those of a recorded call, on a device."""
    tensors, drawn = iter(seen.given), torch.Generator().manual_seed(0)

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, torch.fx.Node):
            return leaf
        spec = next(tensors)
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        if device != "meta":
            memory = torch.randn(Layout(spec.shape, spec.stride).span, generator=drawn)
            memory = memory > 0 if spec.dtype == torch.bool else memory.to(spec.dtype)
            made = memory.as_strided(spec.shape, spec.stride)
        return made.requires_grad_(spec.requires_grad)

    args, kwargs = map_aggregate((node.args, node.kwargs), like)
    return tuple(args), dict(kwargs)


def _number(leaf: Any) -> str:
    """The same for nodes of which another form may have others in their places."""
    return "" if isinstance(leaf, torch.fx.Node) else repr(leaf)


def _text(leaf: Any) -> str:
    """Tells any two numbers apart, and nodes of any two programs by their names."""
    return leaf.name if isinstance(leaf, torch.fx.Node) else repr(leaf)

"""Plain attributes that a forward changes, and those that it reads.

A replayed program does not change them: what depends on them would be wrong. It has what they were made into: it holds
as long as they are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from .private import CALL, MEMBERS

LARGE, DEEP = 1000, 4
"""Containers with more items, and those that are nested deeper, are not looked into."""

TABLES = tuple(key for key, value in vars(torch.nn.Module()).items() if isinstance(value, dict))
"""What torch.nn.Module keeps parameters, buffers, submodules and hooks in."""


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Plain attributes and flags, not what torch.nn.Module keeps in tables of its own, nor parameters beside these."""
    found = vars(module)
    parameters = found.get(MEMBERS[0], ())
    return {key: value for key, value in found.items() if key not in TABLES and key not in parameters}


def containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """The lists, dicts and sets that a value is or holds."""
    if not isinstance(value, (list, tuple, dict, set)) or depth == DEEP:
        return
    if type(value) in (list, dict, set):
        yield value
    if length(value) <= LARGE:
        for item in items(value):
            yield from containers(item, depth + 1)


def length(value: Any) -> int:
    """How many items a container has, whatever its class makes of ``len``."""
    return next(kind.__len__(value) for kind in _KINDS if isinstance(value, kind))


def items(value: Any) -> Iterator[Any]:
    """What a container holds, whatever its class makes of it."""
    if isinstance(value, dict):
        return iter(dict.values(value))
    return next(kind.__iter__(value) for kind in _KINDS if isinstance(value, kind))


_KINDS: tuple[Any, ...] = (list, tuple, dict, set)


def attributes_of(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of each module, by its name; what they hold, not what it is held in."""
    return {
        name: {key: _content(value) for key, value in attributes(module).items()}
        for name, module in model.named_modules()
    }


def changes(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], leaves: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The modules that are not inside leaves, with the first attribute of each that differs; see attributes_of."""
    covered = tuple(f"{leaf}." for leaf in leaves)
    for name, found in after.items():
        known = before.get(name, {})
        keys = dict.fromkeys((*found, *known))
        first = next((key for key in keys if known.get(key, _ABSENT) != found.get(key, _ABSENT)), None)
        if first is not None and not f"{name}.".startswith(covered):
            yield name, first


_ABSENT = object()

UNWATCHED = ("training", "forward", CALL)
"""Attributes that plans do not depend on: the flag that they are chosen by anyway, and what stands in for calls."""


def watched_attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What the plain attributes of each module hold, by its name; without those that plans do not depend on."""
    held = attributes_of(model)
    return {name: {key: value for key, value in found.items() if key not in UNWATCHED} for name, found in held.items()}


class Itself:
    """Equal to what wraps the same object."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.wrapped is other.wrapped

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any, depth: int = 0) -> Any:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return type(value), repr(value)  # a NaN is the same as before
    if not isinstance(value, (list, tuple, dict, set)) or depth == DEEP:
        return Itself(value)
    if length(value) > LARGE:
        return type(value), length(value)
    if isinstance(value, set):
        return type(value), frozenset(value)
    pairs = dict.items(value) if isinstance(value, dict) else enumerate(items(value))
    return type(value), [(key, _content(item, depth + 1)) for key, item in pairs]

"""Plain attributes that a forward changes. A replayed program does not; what depends on them would be wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

LARGE = 1000
"""Containers with more items than this are told apart by their length alone."""


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Plain attributes and flags, not what torch.nn.Module keeps in tables of its own."""
    return {key: value for key, value in vars(module).items() if not (key[0] == "_" and isinstance(value, dict))}


def attributes_of(model: torch.nn.Module, leaves: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """The attributes of each module that is not inside a leaf, by its name; what they hold, not what it is held in."""
    covered = tuple(f"{leaf}." for leaf in leaves)
    return {
        name: {key: _content(value) for key, value in attributes(module).items()}
        for name, module in model.named_modules()
        if not f"{name}.".startswith(covered)
    }


def changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The modules and the first attribute of each that is not the same."""
    for name, found in after.items():
        known = before.get(name, {})
        for key in found.keys() | known.keys():
            if key not in known or key not in found or known[key] != found[key]:
                yield name, key
                break


class _Itself:
    """Equal to what wraps the same object."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.wrapped is other.wrapped

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any) -> Any:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return type(value), repr(value)  # a NaN is the same as before
    if isinstance(value, (list, tuple, dict)) and len(value) > LARGE:
        return type(value), len(value)
    if isinstance(value, (list, tuple)):
        return type(value), [_content(item) for item in value]
    if isinstance(value, dict):
        return type(value), [(key, _content(item)) for key, item in value.items()]
    return _Itself(value)
